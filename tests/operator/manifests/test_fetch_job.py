"""The Job that fetches a model into a shared claim, as it is planned."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, plan

MakePlan = Callable[..., ServicePlan]

MODEL = {"source": "hf://org/m-8B@v1", "name": "m"}
WARM = {"modelCache": {"claimName": "weights", "warm": True}}
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
TEMPLATE = {
    "spec": {
        "nodeSelector": {"zone": "a"},
        "containers": [{"name": "engine", "env": [TOKEN]}, {"name": "proxy", "image": "p"}],
        "initContainers": [{"name": "before", "image": "b"}],
    }
}


def jobs(plan: ServicePlan) -> list[dict[str, Any]]:
    return [item for item in plan.apply if item["kind"] == "Job"]


def job(plan: ServicePlan) -> dict[str, Any]:
    [made] = jobs(plan)
    return made


def container_of(made: dict[str, Any]) -> dict[str, Any]:
    [container] = made["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_only_a_claim_that_asks_for_it_has_a_job(make_plan: MakePlan) -> None:
    quiet = make_plan(model=MODEL, pools={"single": {"modelCache": {"claimName": "weights"}}})
    assert jobs(quiet) == []
    names = {item["metadata"]["name"] for item in quiet.apply}
    assert "demo-fetcher" not in names
    assert "ModelCacheWarm" not in {each["type"] for each in quiet.status["conditions"]}


def test_the_job_fetches_the_model_into_the_claim_and_ends(make_plan: MakePlan) -> None:
    made = job(make_plan(model=MODEL, pools={"single": WARM}))
    pod = made["spec"]["template"]["spec"]
    container = container_of(made)
    assert container["command"] == ["ullage-engine"]
    assert container["args"][:3] == ["fetch", "--source", "hf://org/m-8B@v1"]
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}}
    assert claim in pod["volumes"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    [home] = [each["value"] for each in container["env"] if each["name"] == "HF_HOME"]
    assert home.startswith(f"{mounts['cache']}/")
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
    bounds = ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished")
    assert all(made["spec"][bound] > 0 for bound in bounds)


def empty_maps(item: Any, path: str = "") -> list[str]:
    fields = item.items() if isinstance(item, dict) else enumerate(item)
    inner = [(f"{path}.{key}", each) for key, each in fields if isinstance(each, dict | list)]
    found = [at for at, each in inner if not each and not at.endswith(".emptyDir")]
    return found + [at for where, each in inner for at in empty_maps(each, where)]


def test_nothing_is_asked_for_that_an_api_server_drops(make_plan: MakePlan) -> None:
    """What it drops would be applied again for ever, as drift."""
    assert empty_maps(job(make_plan(model=MODEL, pools={"single": WARM}))) == []


def test_its_pod_is_as_restricted_as_engines_are(make_plan: MakePlan) -> None:
    plan = make_plan(model=MODEL, pools={"single": WARM})
    [engine] = [item for item in plan.apply if item["kind"] == "StatefulSet"]
    pods = [item["spec"]["template"]["spec"] for item in (engine, job(plan))]
    fields = ("securityContext", "automountServiceAccountToken", "enableServiceLinks")
    assert [[pod[name] for name in fields] for pod in pods[:1]] == [
        [pod[name] for name in fields] for pod in pods[1:]
    ]
    contexts = [pod["containers"][0]["securityContext"] for pod in pods]
    assert contexts[0] == contexts[1]
    [policy] = [item for item in plan.apply if item["metadata"]["name"] == "demo-fetcher"]
    labels = job(plan)["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    [rule] = policy["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [8081]


def test_a_pod_template_says_where_it_runs_and_how_it_reaches_the_hub(make_plan: MakePlan) -> None:
    made = job(make_plan(model=MODEL, pools={"single": WARM | {"podTemplate": TEMPLATE}}))
    pod = made["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert TOKEN in container_of(made)["env"]
    assert "initContainers" not in pod


def test_another_pod_is_another_job_and_a_claim_has_one(make_plan: MakePlan) -> None:
    both = {"single": WARM, "more": WARM | {"gpus": 1}}
    one = job(make_plan(model=MODEL, pools={"single": WARM}))
    shared = job(make_plan(model=MODEL, pools=both))
    assert one["metadata"]["name"] == shared["metadata"]["name"]
    changes: list[dict[str, Any]] = [
        {"model": MODEL | {"source": "hf://org/m-8B@v2"}},
        {"image": "registry.example/engine:2"},
        {"pools": {"single": WARM | {"podTemplate": TEMPLATE}}},
    ]
    base = {"model": MODEL, "pools": {"single": WARM}}
    names = {job(make_plan(**base | change))["metadata"]["name"] for change in changes}
    assert len(names | {one["metadata"]["name"]}) == 4
    assert all(len(name) <= 63 for name in names)


@pytest.mark.parametrize(
    ("mesh", "annotation"),
    [
        ("istio", {"sidecar.istio.io/inject": "false"}),
        ("linkerd", {"linkerd.io/inject": "disabled"}),
    ],
)
def test_in_a_mesh_its_pod_has_no_sidecar(
    manifest: Callable[..., dict[str, Any]], mesh: str, annotation: dict[str, str]
) -> None:
    service = parse(manifest(model=MODEL, pools={"single": WARM}))
    made = job(plan(service, Observed(now=datetime.now(UTC)), Settings(mesh=mesh)))
    assert made["spec"]["template"]["metadata"]["annotations"] == annotation
