"""Pods get no more than SECURITY.md says, whatever a pod template says."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.pod_rules import template_problems
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
TOKEN = {"serviceAccountToken": {"path": "token"}}


def sidecar(**more: Any) -> dict[str, Any]:
    return {"containers": [{"name": "side", "image": "x", **more}]}


def volume(**kind: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **kind}]}


SECURITY: list[tuple[str, Any]] = [
    ("capabilities", {"add": ["SYS_ADMIN"]}),
    ("capabilities", {"drop": ["ALL"], "add": ["NET_RAW"]}),
    ("privileged", True),
    ("allowPrivilegeEscalation", True),
    ("runAsUser", 0),
    ("runAsUser", True),
    ("runAsNonRoot", False),
    ("procMount", "Unmasked"),
    ("seccompProfile", {"type": "Unconfined"}),
    ("appArmorProfile", {"type": "Unconfined"}),
    ("seLinuxOptions", {"type": "spc_t"}),
    ("windowsOptions", {"hostProcess": True}),
    ("unheardOf", True),
]
POD_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("hostNetwork", {"hostNetwork": True}),
    ("hostPID", {"hostPID": True}),
    ("hostIPC", {"hostIPC": True}),
    ("ephemeralContainers", {"ephemeralContainers": []}),
    ("serviceAccount", {"serviceAccount": "admin"}),
    ("fieldOfTomorrow", {"fieldOfTomorrow": {}}),
    ("securityContext.sysctls", {"securityContext": {"sysctls": [{"name": "kernel.msgmax"}]}}),
    ("securityContext.windowsOptions", {"securityContext": {"windowsOptions": {}}}),
    ("volumes[v].hostPath", volume(hostPath={"path": "/"})),
    ("volumes[v].nfs", volume(nfs={"server": "a", "path": "/"})),
    ("volumes[v].projected.sources[0].serviceAccountToken", volume(projected={"sources": [TOKEN]})),
    ("containers[side].fieldOfTomorrow", sidecar(fieldOfTomorrow=True)),
    ("containers[side].ports[0].hostPort", sidecar(ports=[{"containerPort": 1, "hostPort": 1}])),
    (
        "containers[side].livenessProbe.httpGet.host",
        sidecar(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
    ),
    (
        "containers[side].lifecycle.preStop.tcpSocket.host",
        sidecar(lifecycle={"preStop": {"tcpSocket": {"host": "a", "port": 80}}}),
    ),
    ("containers[side].securityContext", sidecar(securityContext=[])),
    ("volumes", {"volumes": ["v"]}),
    ("topologySpreadConstraints", {"topologySpreadConstraints": ["a"]}),
]


@pytest.mark.parametrize(("name", "value"), SECURITY)
@pytest.mark.parametrize("kind", ["engine", "side", "init"])
def test_no_container_gets_more_than_others(
    make_plan: MakePlan, kind: str, name: str, value: Any
) -> None:
    asking = {"name": kind, "securityContext": {name: value}}
    place = "initContainers" if kind == "init" else "containers"
    for section, path in (
        ({"pools": {"single": {"podTemplate": {"spec": {place: [asking]}}}}}, "pools.single"),
        ({"router": {"podTemplate": {"spec": {place: [asking]}}}}, "router"),
    ):
        with pytest.raises(InvalidManifest) as caught:
            make_plan(**section)
        where = f"spec.{path}.podTemplate.spec.{place}[{kind}].securityContext.{name}"
        assert where in [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize(("path", "spec"), POD_REFUSED, ids=[path for path, _ in POD_REFUSED])
def test_no_pod_gets_more_than_others(path: str, spec: dict[str, Any]) -> None:
    problems = [*template_problems({"spec": spec}, "p")]
    assert [problem.path for problem in problems] == [f"p.spec.{path}"]
    assert problems[0].message.partition(";")[2] or "must be" in problems[0].message


def test_apparmor_is_not_turned_off_by_an_annotation(make_plan: MakePlan) -> None:
    name = "container.apparmor.security.beta.kubernetes.io/engine"
    template = {"metadata": {"annotations": {name: "unconfined"}}}
    with pytest.raises(InvalidManifest, match=r"unconfined.* is not allowed"):
        make_plan(pools={"single": {"podTemplate": template}})


TAKEN: dict[str, Any] = {
    "affinity": {},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "hostNetwork": False,
    "hostUsers": False,
    "priorityClassName": "high",
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    "securityContext": {
        "supplementalGroups": [7],
        "seLinuxOptions": {"level": "s0:c1,c2"},
        "sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}],
    },
    "initContainers": [{"name": "fetch", "image": "x", "restartPolicy": "Always"}],
    "containers": [
        {
            "name": "side",
            "image": "x",
            "ports": [
                {"name": "a", "containerPort": 53, "protocol": "TCP"},
                {"name": "b", "containerPort": 53, "protocol": "UDP"},
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "livenessProbe": {"httpGet": {"port": 80}},
            "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
            "volumeMounts": [{"name": "models", "mountPath": "/data"}],
        }
    ],
    "volumes": [
        {"name": "models", "csi": {"driver": "models.example"}},
        {"name": "all", "projected": {"sources": [{"secret": {"name": "s"}}]}},
        {"name": "weights", "image": {"reference": "registry.example/weights:1"}},
    ],
}


def test_what_the_restricted_profile_allows_is_taken(make_plan: MakePlan) -> None:
    plan = make_plan(
        router={"podTemplate": {"spec": TAKEN}}, pools={"single": {"podTemplate": {"spec": TAKEN}}}
    )
    kinds = ("Deployment", "StatefulSet")
    for item in (each for each in plan.apply if each["kind"] in kinds):
        pod = item["spec"]["template"]["spec"]
        assert pod["resourceClaims"] == TAKEN["resourceClaims"]
        assert "side" in [each["name"] for each in pod["containers"]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NAMES = ["name", "securityContext", "volumes", "containers", "projected", "sources", "ports"]
NAMES += ["lifecycle", "livenessProbe", "httpGet", "env", "capabilities", "hostPort"]


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        JSON,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_every_document_is_judged(spec: Any) -> None:
    if isinstance(spec, dict):
        for problem in template_problems({"spec": spec}, "p"):
            assert problem.path.startswith("p.spec")
