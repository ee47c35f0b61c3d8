"""Where uploaded files lie: the pod's own disk, a claim, or a volume of the pod template."""

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ullage_operator.api import naming
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]


def router_of(plan: ServicePlan) -> dict[str, Any]:
    for item in plan.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)
    [deployment] = [item for item in plan.apply if item["kind"] == "Deployment"]
    spec: dict[str, Any] = deployment["spec"]
    return spec


def config_of(plan: ServicePlan) -> dict[str, Any]:
    texts = [item["data"] for item in plan.apply if item["kind"] == "ConfigMap"]
    [text] = [data[naming.ROUTER_CONFIG] for data in texts if naming.ROUTER_CONFIG in data]
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def volumes_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in spec["template"]["spec"]["volumes"] if each["name"] == "files"]


def mounts_of(spec: dict[str, Any]) -> list[str]:
    [container] = spec["template"]["spec"]["containers"]
    return [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "files"]


def requests_of(spec: dict[str, Any]) -> dict[str, str]:
    [container] = spec["template"]["spec"]["containers"]
    requests: dict[str, str] = container["resources"]["requests"]
    return requests


def test_without_files_nothing_is_said_of_them(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert "files" not in config_of(plan)
    spec = router_of(plan)
    assert volumes_of(spec) == mounts_of(spec) == []
    assert "ephemeral-storage" not in requests_of(spec)


def test_files_go_with_the_pod_unless_a_claim_is_named(make_plan: MakePlan) -> None:
    plan = make_plan(router={"replicas": 1, "files": {"maxBytes": "1Gi", "ttl": "2h"}})
    assert config_of(plan)["files"] == {
        "dir": naming.FILES_DIR,
        "max_file_bytes": 512 << 20,
        "max_bytes": 1 << 30,
        "max_files": 10_000,
        "ttl": 7200.0,
        "batches": {"max_concurrency": 8, "max_requests": 50_000, "max_active": 64},
    }
    spec = router_of(plan)
    assert volumes_of(spec) == [{"name": "files", "emptyDir": {"sizeLimit": "1152Mi"}}]
    assert mounts_of(spec) == [naming.FILES_DIR]
    assert requests_of(spec)["ephemeral-storage"] == "1152Mi"
    assert spec["strategy"]["type"] == "RollingUpdate"


def test_a_claim_has_one_router_at_a_time(make_plan: MakePlan) -> None:
    files = {"claimName": "files", "path": "/data//files/"}
    plan = make_plan(router={"replicas": 1, "files": files})
    spec = router_of(plan)
    claim = {"name": "files", "persistentVolumeClaim": {"claimName": "files"}}
    assert volumes_of(spec) == [claim]
    assert mounts_of(spec) == [config_of(plan)["files"]["dir"]] == ["/data/files"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert "ephemeral-storage" not in requests_of(spec)


@pytest.mark.parametrize("at", ["/data", "/data/files"])
def test_a_volume_of_the_pod_template_takes_the_files(make_plan: MakePlan, at: str) -> None:
    pod = {
        "volumes": [{"name": "mine", "persistentVolumeClaim": {"claimName": "x"}}],
        "containers": [{"name": "router", "volumeMounts": [{"name": "mine", "mountPath": at}]}],
    }
    files = {"path": "/data/files"}
    plan = make_plan(router={"replicas": 1, "files": files, "podTemplate": {"spec": pod}})
    spec = router_of(plan)
    assert volumes_of(spec) == mounts_of(spec) == []
    assert config_of(plan)["files"]["dir"] == "/data/files"
    assert "ephemeral-storage" not in requests_of(spec)
