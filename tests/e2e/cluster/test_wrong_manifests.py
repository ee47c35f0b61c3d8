"""`kubectl apply` of a wrong manifest answers with the field and the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.release import Release
from ullage_cluster.service import Service, manifest

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("spec.memory.thresholdPercent", {"memory": {"thresholdPercent": 150}}, "or equal to 100"),
    ("spec.device", {"device": "tpu"}, "Unsupported value"),
    ("spec.device", {"device": "cpu"}, '"CPU"'),
    ("spec.rollout.strategy", {"rollout": {"strategy": "canary"}}, '"Canary"'),
    ("spec.rollout.maxWait", {"rollout": {"stepDuration": "1s", "maxWait": "4s"}}, "at least 3m"),
    (
        "spec.pools",
        {"pools": {"single": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}},
        "must not name gpuResourceName",
    ),
    ("spec.router.replicas", {"router": {"replicas": -1}}, "greater than or equal to"),
    ("spec.limits.requestTimeout", {"limits": {"requestTimeout": "soon"}}, "should match"),
    (
        "spec.pools",
        {"pools": {"single": {"gpus": 3, "parallelism": {"tensor": 2, "pipeline": 1}}}},
        "gpus",
    ),
    ("spec.pools", {"pools": {"huge": {"role": "Overflow"}}}, "no pool takes ordinary requests"),
    ("spec.pools", {"pools": {"single": {}, "next": {}}}, "rename the pool"),
    ("spec.rollout.weightSteps", {"rollout": {"weightSteps": [10, 60, 30]}}, "must rise"),
]


@pytest.mark.parametrize(("field", "spec", "reason"), WRONG, ids=[field for field, _, _ in WRONG])
def test_a_wrong_manifest_is_refused(
    kubectl: Kubectl, release: Release, field: str, spec: dict[str, Any], reason: str
) -> None:
    text = yaml.safe_dump(manifest("wrong", **spec))
    done = kubectl.run("apply", "--filename", "-", stdin=text)
    assert done.returncode == 1
    assert field in done.stderr, done.stderr
    assert reason in done.stderr, done.stderr


def test_an_unknown_field_is_named(kubectl: Kubectl, release: Release) -> None:
    text = yaml.safe_dump(manifest("wrong", modell={}))
    done = kubectl.run("apply", "--filename", "-", stdin=text)
    assert done.returncode == 1, done.stderr
    assert 'unknown field "spec.modell"' in done.stderr, done.stderr


def test_a_missing_secret_is_named_within_a_minute(
    make_service: Callable[..., Service], open_nodes: None
) -> None:
    made = make_service("no-keys", tenants={"secretName": "nobody-made-it"})
    until(lambda: made.condition("Degraded").get("status") == "True", "it says so", 60)
    told = made.condition("Degraded")
    assert "nobody-made-it" in told["message"], told
    progressing = made.condition("Progressing")
    assert progressing["status"] == "True", progressing


def test_what_kubernetes_refuses_of_pods_names_the_pool(
    make_service: Callable[..., Service],
) -> None:
    pools = {"single": {"gpus": 1, "podTemplate": {"spec": {"dnsPolicy": "Sometimes"}}}}
    made = make_service("bad-dns", pools=pools)
    # Kubernetes 1.30 takes the StatefulSet and refuses its pods.
    reasons = {"ApplyFailed": "spec.pools.single", "PodsNotMade": "StatefulSet bad-dns-single"}
    until(lambda: made.condition("Degraded").get("reason") in reasons, "it says so", 60)
    condition = made.condition("Degraded")
    told = condition["message"]
    assert "dnsPolicy" in told, told
    assert reasons[condition["reason"]] in told, told


def test_what_a_pod_template_may_not_say_is_named(
    kubectl: Kubectl, release: Release, make_service: Any
) -> None:
    pools = {"single": {"gpus": 1, "podTemplate": {"spec": {"serviceAccountName": "root"}}}}
    made = make_service("own-account", pools=pools)
    until(lambda: made.condition("Degraded").get("reason") == "InvalidSpec", "it says so", 60)
    told = made.condition("Degraded")["message"]
    assert (
        "spec.pools.single.podTemplate.spec.serviceAccountName: is set by the operator" in told
    ), told


def test_what_only_the_engine_can_know_is_told_in_the_status(
    kubectl: Kubectl, make_service: Callable[..., Service], open_nodes: None
) -> None:
    made = make_service("no-image", image="ullage/no-such-image:0")
    kubectl("wait", "--for=condition=Ready=False", f"llmservice/{made.name}", "--timeout=120s")
    degraded = "jsonpath={.status.conditions[?(@.type=='Degraded')].status}=True"
    kubectl("wait", f"--for={degraded}", f"llmservice/{made.name}", "--timeout=170s")
    told = made.condition("Degraded")["message"]
    assert "no-such-image" in told, told
