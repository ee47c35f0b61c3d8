"""Services behind the sidecars of a mesh."""

from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NAMES = {
    "istio": "traffic.sidecar.istio.io/excludeInboundPorts",
    "linkerd": "config.linkerd.io/skip-inbound-ports",
}
WIDE = {"gpus": 8, "nodes": 2, "parallelism": {"tensor": 4, "pipeline": 2}}


def templates(manifest: Any, mesh: Any, **spec: Any) -> dict[str, dict[str, Any]]:
    made = plan(parse(manifest(**spec)), Observed(now=NOW), Settings(mesh=mesh)).apply
    return {
        item["metadata"]["name"]: item["spec"]["template"]
        for item in made
        if item["kind"] in ("Deployment", "StatefulSet")
    }


@pytest.mark.parametrize("mesh", NAMES)
def test_sidecars_leave_alone_what_the_operator_and_the_kubelet_ask(
    manifest: Any, mesh: str
) -> None:
    made = templates(manifest, mesh, engine="VLLM", pools={"single": {}, "large": WIDE})
    assert set(made) == {"demo-router", "demo-single", "demo-large", "demo-large-group"}
    for name, template in made.items():
        annotations = template["metadata"]["annotations"]
        assert annotations[NAMES[mesh]] == "8081,9090", name
    container = made["demo-single"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == 8081


def test_an_annotation_of_ones_own_stays(manifest: Any) -> None:
    own = {"metadata": {"annotations": {NAMES["istio"]: "8081,9090,7777"}}}
    made = templates(manifest, "istio", pools={"single": {"podTemplate": own}})
    assert made["demo-single"]["metadata"]["annotations"][NAMES["istio"]] == "8081,9090,7777"
    assert made["demo-router"]["metadata"]["annotations"][NAMES["istio"]] == "8081,9090"


def test_without_a_mesh_pods_are_as_they_were(manifest: Any) -> None:
    for template in templates(manifest, "").values():
        assert not {*NAMES.values()} & template["metadata"]["annotations"].keys()


def test_a_mesh_that_is_not_known_is_refused() -> None:
    with pytest.raises(SystemExit, match="ULLAGE_MESH='consul' is not a known mesh"):
        Settings.from_env({"ULLAGE_MESH": "consul"})
