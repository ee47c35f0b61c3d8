"""What pools and the router say of their pods; all are of Pod Security's restricted profile."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import kubernetes_validate
import pytest

from ullage_operator.api.errors import InvalidManifest
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.restarts import HUNG_GRACE_S

MakePlan = Callable[..., ServicePlan]
Pod = dict[str, Any]

TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
TERM = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "x"}}}
AFFINITY = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}
SPREAD_FIELD = "topologySpreadConstraints"
SPREAD = {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
FROM_SECRET = {"secretKeyRef": {"name": "hub", "key": "token"}}
SIDECAR = {
    "name": "log",
    "image": "log:1",
    "resources": {"limits": {"memory": "1024Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    },
}
POD = {
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [TOLERATION],
    "affinity": AFFINITY,
    SPREAD_FIELD: [SPREAD],
    "priorityClassName": "urgent",
    "runtimeClassName": "nvidia",
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
    "securityContext": {"supplementalGroups": [7]},
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "big", "emptyDir": {"sizeLimit": "2048Mi"}},
        {"name": "map", "configMap": {"name": "m"}},
        {"name": "hub", "csi": {"driver": "secrets.example"}},
    ],
}
OWN = {
    "env": [{"name": "A", "value": "x"}, {"name": "HF_TOKEN", "valueFrom": FROM_SECRET}],
    "envFrom": [{"prefix": "P_", "configMapRef": {"name": "settings"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
}
META = {"labels": {"team": "a"}, "annotations": {"note": "b"}}


def template_for(own: str) -> dict[str, Any]:
    """A pod template with all that pods may have beside what the operator sets."""
    containers = [SIDECAR, {"name": own, "stdin": True, **OWN}]
    return {"metadata": META, "spec": POD | {"containers": containers}}


FULL = {
    "resources": {"requests": {"cpu": 2, "memory": "4096Mi"}, "limits": {"memory": "4096Mi"}},
    "gpuResourceName": "nvidia.com/mig-3g.40gb",
    "shmSize": "1024Mi",
    "modelCache": {"claimName": "cache"},
    "podTemplate": template_for("engine"),
}
WHOLE: dict[str, Any] = {
    "pools": {"single": FULL},
    "router": {"podTemplate": template_for("router")},
    "tls": {"router": {"secretName": "r"}, "engines": {"secretName": "e"}},
    "tenants": {"secretName": "keys"},
    "model": {"source": "pvc://weights/m", "name": "m"},
    "imagePullSecrets": [{"name": "registry"}],
}
MONITORED = Observed(now=datetime.now(UTC), serves=frozenset({"PodMonitor"}))
SPECS = pytest.mark.parametrize("spec", [{}, {"device": "CPU"}, WHOLE], ids=["plain", "cpu", "all"])


@pytest.mark.parametrize("component", ["engine", "router"])
def test_a_pod_template_lies_under_what_the_operator_sets(
    make_plan: MakePlan, component: str
) -> None:
    spec = WHOLE | {"pools": {"single": FULL | {"podTemplate": {}}}, "router": {}}
    plain = templates(make_plan(**spec))[component]
    made = templates(make_plan(**WHOLE))[component]
    assert made["metadata"]["labels"] == plain["metadata"]["labels"] | META["labels"]
    assert made["metadata"]["annotations"].items() >= META["annotations"].items()
    pod = made["spec"]
    own = plain["spec"]
    for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "hostAliases"):
        assert pod[field] == POD[field]
    assert pod["securityContext"] == own["securityContext"] | {"supplementalGroups": [7]}
    big = {"name": "big", "emptyDir": {"sizeLimit": "2Gi"}}
    given = [big if volume["name"] == "big" else volume for volume in POD["volumes"]]
    assert pod["volumes"] == [*own["volumes"], *given]
    [constraint] = pod["topologySpreadConstraints"]
    match = plain["metadata"]["labels"]
    assert constraint == SPREAD | {"labelSelector": {"matchLabels": match}}
    container, sidecar = pod["containers"]
    assert sidecar == SIDECAR | {"resources": {"limits": {"memory": "1Gi"}}}
    [before] = own["containers"]
    assert container == before | {
        "stdin": True,
        "env": [*before.get("env", ()), *OWN["env"]],
        "envFrom": OWN["envFrom"],
        "volumeMounts": [*before["volumeMounts"], *OWN["volumeMounts"]],
    }


CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    ("serviceAccountName", {"serviceAccountName": "root"}, "spec.serviceAccount.name instead"),
    ("terminationGracePeriodSeconds", {"terminationGracePeriodSeconds": 1}, "limits.totalTimeout"),
    ("securityContext.runAsUser", {"securityContext": {"runAsUser": 0}}, "leave it out"),
    (
        "volumes[cache]",
        {"volumes": [{"name": "cache", "emptyDir": {"medium": "Memory"}}]},
        "single.modelCache instead",
    ),
    (
        "securityContext.fsGroup",
        {"securityContext": {"fsGroup": 7}},
        "spec.securityContext instead",
    ),
    ("volumes[shm]", {"volumes": [{"name": "shm", "emptyDir": {}}]}, "single.shmSize instead"),
]
CONFLICTS += [
    (
        f"containers[engine].{field}",
        {"containers": [{"name": "engine", name: value}]},
        remedy,
    )
    for field, name, value, remedy in (
        ("image", "image", "mine", "set spec.image instead"),
        ("args", "args", ["--help"], "leave it out"),
        ("livenessProbe.httpGet", "livenessProbe", {"httpGet": {"port": 1}}, "leave it out"),
        ("lifecycle.preStop.exec", "lifecycle", {"preStop": {"exec": {}}}, "leave it out"),
        ("livenessProbe.grpc.port", "livenessProbe", {"grpc": {"port": 1}}, "leave it out"),
        ("resources", "resources", {"limits": {"memory": "1Gi"}}, "single.resources instead"),
        ("env[HF_HOME]", "env", [{"name": "HF_HOME", "value": "/"}], "single.modelCache instead"),
        ("ports[9000]", "ports", [{"containerPort": 9000}], "leave it out"),
        (
            "volumeMounts",
            "volumeMounts",
            {"data": "/data"},
            "objects, each with a mountPath of its",
        ),
        (
            "volumeMounts[/tmp/x]",
            "volumeMounts",
            [{"name": "data", "mountPath": "/tmp/x"}],
            "lies in /tmp, which is the operator's own",
        ),
        *(
            (
                f"volumeMounts[{path}]",
                "volumeMounts",
                [{"name": "data", "mountPath": path}],
                problem,
            )
            for path, problem in (
                ("/", "holds /etc/ullage, which"),
                ("/etc", "holds /etc/ullage, which"),
                ("/var/cache/", "holds /var/cache/ullage, which"),
                ("/data/../tmp", "lies in /tmp, which"),
            )
        ),
    )
]


def test_what_the_operator_sets_of_pods_is_refused_by_name(
    make_plan: MakePlan, subtests: pytest.Subtests
) -> None:
    for field, pod, remedy in CONFLICTS:
        with subtests.test(field), pytest.raises(InvalidManifest) as caught:
            make_plan(pools={"single": {"podTemplate": {"spec": pod}}})
        [problem] = caught.value.problems
        assert problem.path == f"spec.pools.single.podTemplate.spec.{field}"
        assert remedy in problem.message
    router = {"podTemplate": {"spec": {"containers": [{"name": "router", "image": "mine"}]}}}
    with pytest.raises(
        InvalidManifest, match=r"^spec\.router\.podTemplate\.spec\.containers\[router"
    ):
        make_plan(router=router)


def test_what_a_pod_template_says_as_the_operator_does_is_no_conflict(make_plan: MakePlan) -> None:
    secrets = [{"name": "registry"}]
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True},
        "imagePullSecrets": secrets,
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "containers": [
            {
                "name": "engine",
                "volumeMounts": [
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "data", "mountPath": "/etcetera"},
                ],
            }
        ],
    }
    made = make_plan(pools={"single": {"podTemplate": {"spec": spec}}}, imagePullSecrets=secrets)
    pod = engine(made)
    assert pod["imagePullSecrets"] == secrets
    assert [each["name"] for each in pod["volumes"]].count("tmp") == 1


def test_no_spread_is_a_choice(make_plan: MakePlan) -> None:
    pod = engine(make_plan(pools={"single": {"podTemplate": {"spec": {SPREAD_FIELD: []}}}}))
    assert not pod[SPREAD_FIELD]


def test_an_empty_pod_template_changes_nothing(make_plan: MakePlan) -> None:
    empty = {"podTemplate": {"metadata": {}, "spec": {}}}
    assert templates(make_plan(pools={"single": empty}, router=empty)) == templates(make_plan())


def templates(plan: ServicePlan) -> dict[str, dict[str, Any]]:
    """Pod templates by component."""
    return {
        item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"][
            "template"
        ]
        for item in plan.apply
        if item["kind"] in ("Deployment", "StatefulSet")
    }


def engine(plan: ServicePlan) -> Pod:
    pod: Pod = templates(plan)["engine"]["spec"]
    return pod


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_pods_with_all_they_can_have(make_plan: MakePlan, version: str) -> None:
    for item in make_plan(**WHOLE).apply:
        kubernetes_validate.validate(item, version, strict=True)


def test_a_router_has_the_time_to_answer_what_it_holds(make_plan: MakePlan) -> None:
    sleepy = {"single": {"autoscaling": {"maxReplicas": 2, "minReplicas": 0}}}
    spec = {"routing": {"wake": {"timeout": "100s"}}}
    made = [templates(make_plan(pools=pools, **spec))["router"] for pools in (sleepy, {})]
    held, other = (each["spec"]["terminationGracePeriodSeconds"] for each in made)
    assert held == other + 100


def test_a_pod_has_half_an_hour_to_start_unless_its_pool_says_otherwise(
    make_plan: MakePlan,
) -> None:
    for given, seconds in (({}, 1800), ({"startTimeout": "2h2s"}, 7205)):
        [container] = engine(make_plan(pools={"single": given}))["containers"]
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


@pytest.mark.parametrize("component", ["engine", "router"])
def test_pods_are_spread_over_nodes_unless_told_otherwise(
    make_plan: MakePlan, component: str
) -> None:
    [constraint] = templates(make_plan())[component]["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


def test_an_engine_carries_what_its_pool_says(make_plan: MakePlan) -> None:
    pod = engine(make_plan(**WHOLE))
    container = pod["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/mig-3g.40gb": "1"},
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"sizeLimit": "64Gi"}, {"emptyDir": {"sizeLimit": "64Gi"}}),
        ({"claimName": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
        ({"hostPath": "/models"}, {"hostPath": {"path": "/models", "type": "Directory"}}),
    ],
)
def test_models_are_cached_where_the_pool_says(
    make_plan: MakePlan, cache: dict[str, Any], volume: dict[str, Any]
) -> None:
    pod = engine(make_plan(pools={"single": {"modelCache": cache}}))
    assert {"name": "cache", **volume} in pod["volumes"]
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["cache"] == {"name": "cache", "mountPath": "/var/cache/ullage"}
    homes = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
    assert homes["HF_HOME"].startswith(mounts["cache"]["mountPath"])


def test_the_dcgm_exporter_can_tell_whose_a_gpu_is(make_plan: MakePlan) -> None:
    """It joins by pods' limits of GPU resources, and adds pods' labels where it is told to."""
    template = templates(make_plan(pools={"single": {"gpus": 1}}))["engine"]
    assert template["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    labels = template["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "demo"
    assert labels["serving.ullage.dev/pool"] == "single"


def test_accounts_carry_annotations_and_no_token(make_plan: MakePlan) -> None:
    annotations = {"iam.example/role": "reader"}
    plan = make_plan(serviceAccount={"annotations": annotations})
    accounts = [item for item in plan.apply if item["kind"] == "ServiceAccount"]
    assert len(accounts) == 2
    for account in accounts:
        assert account["metadata"]["annotations"] == annotations
        assert account["automountServiceAccountToken"] is False


def identities(plan: ServicePlan) -> Iterator[tuple[dict[str, Any], set[int]]]:
    """The user and groups of each workload's pods, and the modes of the Secrets that they read."""
    for template in templates(plan).values():
        pod = template["spec"]
        ids = {
            name: number
            for name, number in pod["securityContext"].items()
            if name in ("runAsUser", "runAsGroup", "fsGroup")
        }
        modes = {each["secret"]["defaultMode"] for each in pod["volumes"] if "secret" in each}
        yield ids, modes


def test_user_and_groups_are_the_images_or_the_specs_or_nobodys(make_plan: MakePlan) -> None:
    tls = {"router": {"secretName": "r"}, "engines": {"secretName": "e"}}
    usual = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    own = {"runAsUser": 1000680000, "fsGroup": 7}
    for context, wanted, mode in (
        (None, usual, 0o440),
        ({}, {}, 0o444),
        (own, own, 0o440),
    ):
        spec = {} if context is None else {"securityContext": context}
        plan = make_plan(tls=tls, **spec)
        assert list(identities(plan)) == [(wanted, {mode})] * 2, context
        for template in templates(plan).values():
            # All else of the restricted profile stays, which OpenShift's restricted-v2 asks for.
            assert template["spec"]["securityContext"]["runAsNonRoot"] is True
            assert not [
                found
                for container in template["spec"]["containers"]
                for found in contained(container)
            ]


def test_a_user_that_the_image_does_not_know_has_a_name(make_plan: MakePlan) -> None:
    def users(**spec: Any) -> list[Any]:
        variables = engine(make_plan(**spec))["containers"][0]["env"]
        return [each.get("value") for each in variables if each["name"] == "USER"]

    assert users() == []
    assert users(securityContext={}) == users(securityContext={"runAsUser": 7}) == ["ullage"]
    env = [{"name": "USER", "value": "me"}]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    pools = {"single": {"podTemplate": template}}
    assert users(securityContext={}, pools=pools) == ["me"]


def test_pods_run_as_the_account_that_is_named(make_plan: MakePlan) -> None:
    def accounts(**spec: Any) -> set[str]:
        made = templates(make_plan(**spec)).values()
        return {template["spec"]["serviceAccountName"] for template in made}

    assert accounts() == {"demo-engine", "demo-router"}
    assert accounts(serviceAccount={"name": "mine"}) == {"mine"}
    # The pods that still run as the operator's own accounts could not be made anew without them.
    plan = make_plan(serviceAccount={"name": "mine"})
    assert [item["kind"] for item in plan.apply].count("ServiceAccount") == 2


def test_monitors_are_as_told(make_plan: MakePlan) -> None:
    told = {"interval": "30s", "labels": {"release": "prometheus"}}
    plan = make_plan(MONITORED, observability={"podMonitor": told})
    monitors = [item for item in plan.apply if item["kind"] == "PodMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "30s"
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    off = make_plan(MONITORED, observability={"podMonitor": {"enabled": False}})
    assert "PodMonitor" not in [item["kind"] for item in off.apply]


def restricted(pod: Pod) -> Iterator[str]:
    """What the restricted profile, baseline included, finds wrong; fields as its page has them."""
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"}
    allowed |= {"persistentVolumeClaim", "projected", "secret"}
    for volume in pod["volumes"]:
        yield from (f"volumes: {kind}" for kind in set(volume) - {"name"} - allowed)
    for field in ("hostNetwork", "hostPID", "hostIPC", "hostUsers"):
        if field in pod:
            yield field
    security = pod["securityContext"]
    if not (security["runAsNonRoot"] is True and security["runAsUser"] > 0):
        yield "runAsNonRoot"
    if security["seccompProfile"]["type"] not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    for field in {"sysctls", "seLinuxOptions", "appArmorProfile", "windowsOptions"} & set(security):
        yield field
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        yield from contained(container)


def contained(container: dict[str, Any]) -> Iterator[str]:
    security = container["securityContext"]
    if security.get("privileged") or security["allowPrivilegeEscalation"] is not False:
        yield "allowPrivilegeEscalation"
    if security["capabilities"] != {"drop": ["ALL"]}:
        yield "capabilities"
    if {"procMount", "runAsUser", "runAsNonRoot", "seccompProfile"} & set(security):
        yield "securityContext"
    yield from ("hostPort" for port in container.get("ports", ()) if "hostPort" in port)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield from ("host" for act in container.get(probe, {}).values() if "host" in dict_of(act))


def dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@SPECS
def test_pod_security_restricted_takes_every_pod(make_plan: MakePlan, spec: dict[str, Any]) -> None:
    for template in templates(make_plan(**spec)).values():
        assert not list(restricted(template["spec"]))
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_folder_of_the_node_is_not_restricted(make_plan: MakePlan) -> None:
    plan = make_plan(pools={"single": {"modelCache": {"hostPath": "/models"}}})
    assert list(restricted(engine(plan))) == ["volumes: hostPath"]


def kubectl(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace of a real cluster that admits restricted pods only."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("asks a real API server: set KUBECONFIG")
    name = f"ullage-pods-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    assert kubectl("create", "namespace", name).returncode == 0
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@SPECS
def test_a_real_api_server_admits_every_pod(
    make_plan: MakePlan, namespace: str, spec: dict[str, Any]
) -> None:
    for component, template in templates(make_plan(**spec)).items():
        # What a pod names must be there to be admitted: its account, class and priority.
        named = {"serviceAccountName", "runtimeClassName", "priorityClassName"}
        pod = {name: value for name, value in template["spec"].items() if name not in named}
        meta = {"name": component, "namespace": namespace}
        made = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})
        done = kubectl("create", "--dry-run=server", "-f", "-", given=made)
        assert done.returncode == 0, done.stderr


def test_a_hung_container_has_seconds_to_end_and_a_draining_one_its_whole_time(
    make_plan: MakePlan,
) -> None:
    """A probe's own grace; the pod's is that of its drain."""
    wide = {"gpus": 8, "nodes": 2, "parallelism": {"tensor": 4, "pipeline": 2}}
    made = make_plan(engine="VLLM", pools={"single": {}, "large": wide})
    workloads = [item for item in made.apply if item["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == 4
    for item in workloads:
        spec = item["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > 540
        for container in spec["containers"]:
            for name in ("startupProbe", "livenessProbe"):
                assert container[name]["terminationGracePeriodSeconds"] == HUNG_GRACE_S
            # The API server refuses it there.
            assert "terminationGracePeriodSeconds" not in container["readinessProbe"]
