"""spec.tls: Secrets in pods, probes that speak no TLS, and configurations that say the same."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from ullage_cli.local.plan import plan_local
from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import EngineTLS, RouterConfig, ServerTLS
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
Make = Callable[..., dict[str, Any]]
FULL = {
    "router": {"secretName": "front", "clientCASecretName": "clients"},
    "engines": {"secretName": "back", "routerSecretName": "back-router"},
}


def find(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    [found] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def router_config(plan: ServicePlan) -> RouterConfig:
    text = find(plan, "ConfigMap", "demo-router")["data"]["router.yaml"]
    return msgspec.convert(yaml.safe_load(text), RouterConfig)


def engine_config(plan: ServicePlan) -> EngineConfig:
    text = find(plan, "ConfigMap", "demo-single")["data"]["engine.yaml"]
    return msgspec.convert(yaml.safe_load(text), EngineConfig)


def secrets(plan: ServicePlan, kind: str, name: str) -> dict[str, str]:
    """Secret by the path at which the pod mounts it."""
    pod = find(plan, kind, name)["spec"]["template"]["spec"]
    names = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounts = pod["containers"][0]["volumeMounts"]
    return {m["mountPath"]: names[m["name"]] for m in mounts if m["name"] in names}


def probes(plan: ServicePlan, kind: str, name: str) -> list[Any]:
    container = find(plan, kind, name)["spec"]["template"]["spec"]["containers"][0]
    made = [container[f"{word}Probe"] for word in ("startup", "readiness", "liveness")]
    return [probe.get("grpc", {}).get("port") for probe in made]


def test_configurations_name_what_pods_mount(make_plan: MakePlan) -> None:
    plan = make_plan(tls=FULL, tenants={"secretName": "keys"})
    for item in plan.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)
    tls = router_config(plan).tls
    mounted = secrets(plan, "Deployment", "demo-router")
    assert tls.router
    assert tls.engines
    assert mounted[tls.router.dir] == "front"
    assert mounted[str(tls.router.client_ca_dir)] == "clients"
    assert mounted[tls.engines.dir] == "back-router"
    assert "keys" in mounted.values()
    assert tls.engines.server_name == "demo-engine.models.svc"
    folder = engine_config(plan).server.tls_dir
    assert secrets(plan, "StatefulSet", "demo-single") == {folder: "back"}


def test_probes_have_a_port_of_their_own(make_plan: MakePlan) -> None:
    plan = make_plan(tls=FULL)
    assert probes(plan, "Deployment", "demo-router") == [8081] * 3
    assert probes(plan, "StatefulSet", "demo-single") == [8081] * 3
    section = router_config(plan).probes
    assert section is not None
    assert section.port == 8081
    assert engine_config(plan).server.probe_port == 8081
    services = [find(plan, "Service", name) for name in ("demo-router", "demo-single")]
    assert not [p for s in services for p in s["spec"]["ports"] if p["port"] == 8081]


def test_each_side_by_itself(make_plan: MakePlan) -> None:
    front = make_plan(tls={"router": {"secretName": "front"}})
    assert router_config(front).tls.router == ServerTLS(dir="/etc/ullage-tls")
    assert engine_config(front).server.tls_dir is None
    assert probes(front, "StatefulSet", "demo-single") == [9000] * 3
    back = make_plan(tls={"engines": {"secretName": "back", "serverName": "e.test"}})
    config = router_config(back)
    assert config.tls.router is None
    assert config.probes is None
    assert config.tls.engines == EngineTLS(dir="/etc/ullage-engine-tls", server_name="e.test")
    assert secrets(back, "Deployment", "demo-router") == {"/etc/ullage-engine-tls": "back"}
    assert probes(back, "Deployment", "demo-router") == [None] * 3


def test_the_world_is_told_the_scheme(make_plan: MakePlan) -> None:
    plan = make_plan(tls=FULL)
    ports = find(plan, "Service", "demo-router")["spec"]["ports"]
    assert [port["appProtocol"] for port in ports] == ["https", "https"]
    assert plan.status["endpoint"] == "https://demo-router.models.svc:8000"
    plain = make_plan()
    ports = find(plain, "Service", "demo-router")["spec"]["ports"]
    assert [port["appProtocol"] for port in ports] == ["http", "kubernetes.io/h2c"]
    assert plain.status["endpoint"] == "http://demo-router.models.svc:8000"
    assert router_config(plain).tls.router is None
    assert not secrets(plain, "StatefulSet", "demo-single")


@pytest.mark.parametrize(
    ("tls", "line"),
    [
        ({}, "set tls.router, tls.engines or both"),
        ({"router": {}}, "spec.tls.router.secretName: required field is missing"),
        ({"engines": {"secretName": "Back"}}, "must match"),
        ({"router": {"secretName": "s", "clientCaSecretName": "c"}}, "mean clientCASecretName?"),
    ],
)
def test_mistakes_say_what_to_do(manifest: Make, tls: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidManifest, match=re.escape(line)):
        parse(manifest(tls=tls))


def test_a_local_run_gives_each_pod_its_own_secrets(manifest: Make, tmp_path: Path) -> None:
    for name in ("front", "clients", "back", "back-router"):
        (tmp_path / name).mkdir()
    service = parse(manifest(tls=FULL))
    plan = plan_local(
        service, tmp_path, http_port=0, grpc_port=0, log_level="info", secrets=tmp_path
    )
    texts = {file.path.name: yaml.safe_load(file.text) for file in plan.files}
    router = msgspec.convert(texts["router.yaml"], RouterConfig)
    engine = msgspec.convert(texts["engine.yaml"], EngineConfig)
    assert router.tls.router
    assert router.tls.engines
    assert router.probes
    assert router.tls.router.dir == str(tmp_path / "front")
    assert router.tls.engines.dir == str(tmp_path / "back-router")
    assert engine.server.tls_dir == str(tmp_path / "back")
    ports = {pod.name: pod.ports["probe"] for pod in plan.pods}
    assert router.probes.port == ports["demo-router-0"]
    assert engine.server.probe_port == ports["demo-single-0"]
    assert router.probes.host == "127.0.0.1"
