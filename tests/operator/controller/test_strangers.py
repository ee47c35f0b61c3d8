"""Which of the pods with a service's labels are its own."""

from typing import Any

import pytest

from ullage_operator.controller.observe import is_of_workload

ENGINES = {"kind": "StatefulSet", "metadata": {"name": "demo-single", "uid": "uid-set"}}
COPY = {"kind": "StatefulSet", "metadata": {"name": "demo-debug", "uid": "uid-copy"}}
"""Somebody's, without an owner and with all labels."""
ROUTERS = {"kind": "Deployment", "metadata": {"name": "demo-router", "uid": "uid-deployment"}}


def pod(**owner: Any) -> dict[str, Any]:
    owners = [owner | {"controller": True}] if owner else []
    labels = {"pod-template-hash": "abc", "serving.ullage.dev/pool": "single"}
    return {"metadata": {"name": "pod", "labels": labels, "ownerReferences": owners}}


@pytest.mark.parametrize(
    ("found", "is_own"),
    [
        (pod(kind="StatefulSet", name="demo-single", uid="uid-set"), True),
        (pod(kind="StatefulSet", name="demo-single", uid="uid-before"), False),
        (pod(kind="StatefulSet", name="demo-debug", uid="uid-copy"), False),
        (pod(kind="ReplicaSet", name="demo-router-abc", uid="any"), True),
        (pod(kind="ReplicaSet", name="theirs-abc", uid="any"), False),
        (pod(kind="ReplicaSet", name="demo-router-other", uid="any"), False),
        (pod(kind="Job", name="demo-single", uid="uid-set"), False),
        (pod(), False),
        ({"metadata": {"name": "pod"}}, False),
    ],
)
def test_a_pod_is_its_workloads(found: dict[str, Any], is_own: bool) -> None:
    assert is_of_workload(found, [ENGINES, COPY, ROUTERS], "demo") is is_own
