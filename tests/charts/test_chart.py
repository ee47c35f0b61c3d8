"""The chart: lints, renders valid objects, refuses typos, and grants no more than is used."""

import itertools
import re
import subprocess
import sys
import tomllib
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from ullage_testing.ports import free_port

from ullage_common.process.metrics_endpoint import serve_metrics
from ullage_operator.api.naming import OWNED, operator_selector, selector
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.main import arguments_parser
from ullage_operator.manifests.engine_choice import engine_image
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan

with warnings.catch_warnings():
    # The library still reads its schemas through pkg_resources-like means that warn on import.
    warnings.simplefilter("ignore")
    import kubernetes_validate

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ullage"
VALUE_SETS = [
    (),
    ("crds.enabled=false",),
    ("watch.namespaces={a,b}",),
    ("replicas=2", "leaderElection.leaseSeconds=5"),
    ("leaderElection.enabled=false",),
    ("podMonitor.enabled=true", "podMonitor.additionalLabels.release=prometheus"),
    ("serviceAccount.create=false", "serviceAccount.name=mine", "rbac.create=false"),
    ("fullnameOverride=other", "image.tag=v1", "imagePullSecrets[0].name=registry"),
    tuple(f"podSecurityContext.{name}=null" for name in ("runAsUser", "runAsGroup", "fsGroup")),
    ("podLabels.team=x", "podAnnotations.note=y", "nodeSelector.disk=ssd", "priorityClassName=p"),
]


HOOK = "helm.sh/hook"
AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"


def by_kind(objects, kind):
    """Without what `helm test` makes, and the roles of people."""
    return [
        obj
        for obj in objects
        if obj["kind"] == kind
        and HOOK not in obj["metadata"].get("annotations", {})
        and not aggregates(obj)
    ]


def aggregates(obj):
    """The cluster's roles that a role adds to."""
    labels = obj["metadata"].get("labels", {})
    return {key.removeprefix(AGGREGATE) for key in labels if key.startswith(AGGREGATE)}


def rules(objects):
    """(group, resource) -> verbs of the one role over what is served."""
    roles = by_kind(objects, "ClusterRole") or by_kind(objects, "Role")
    (role, *_) = [role for role in roles if not role["metadata"]["name"].endswith("-lease")]
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_lint(helm):
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("version", "ok"), [("1.29.9", False), ("1.30.0", True)])
def test_only_a_cluster_that_knows_sleeping_hooks_is_taken(helm, version, ok):
    named = ("--set", "imageRegistry=localhost")
    done = helm("template", "release", str(CHART), "--kube-version", version, *named)
    assert (done.returncode == 0) is ok, done.stderr


@pytest.mark.parametrize("values", VALUE_SETS)
def test_rendered_objects_are_valid(render, values):
    objects = render(*values)
    assert by_kind(objects, "Deployment")
    for obj in objects:
        if obj["apiVersion"].startswith("monitoring.coreos.com"):
            assert obj["metadata"]["labels"]["release"] == "prometheus"
        else:
            kubernetes_validate.validate(obj, "1.35", strict=True)


def test_the_crd_comes_out_as_it_is_in_the_repository(render):
    sources = sorted((ROOT / "crds").iterdir())
    made = by_kind(render(), "CustomResourceDefinition")
    assert [crd["spec"]["names"]["kind"] for crd in made] == ["LLMServiceBase", "LLMService"]
    assert made == [yaml.safe_load(source.read_text()) for source in sources]
    for crd in made:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert by_kind(render("crds.enabled=false"), "CustomResourceDefinition") == []


def test_the_pod_is_hardened(render):
    (deployment,) = by_kind(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # By these the engines' NetworkPolicy knows it.
    assert (
        operator_selector().items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]


def test_people_see_and_edit_services_by_the_clusters_roles(render):
    verbs = {"view": set(), "edit": set(), "admin": set()}
    for role in (obj for obj in render() if aggregates(obj)):
        for rule in role["rules"]:
            assert rule["apiGroups"] == ["serving.ullage.dev"]
            for name in aggregates(role):
                verbs[name] |= {*itertools.product(rule["resources"], rule["verbs"])}
    services = "llmservices"
    assert {verb for each, verb in verbs["view"] if each == services} == {"get", "list", "watch"}
    for name in ("edit", "admin"):
        assert verbs["view"] < verbs[name]
        assert {(services, "create"), (services, "delete")} <= verbs[name]
        assert (f"{services}/scale", "patch") in verbs[name]
        assert (f"{services}/status", "patch") not in verbs[name]
    for off in ("rbac.aggregate=false", "rbac.create=false"):
        assert not [obj for obj in render(off) if aggregates(obj)]


def test_helm_test_asks_the_operator_that_the_policy_lets_it_reach(render):
    made = [obj for obj in render() if HOOK in obj["metadata"].get("annotations", {})]
    by_name = {obj["kind"]: obj for obj in made}
    service, policy, pod = (by_name[kind] for kind in ("Service", "NetworkPolicy", "Pod"))
    (deployment,) = by_kind(render(), "Deployment")
    template = deployment["spec"]["template"]
    own = pod["metadata"]["labels"]
    for match in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert match.items() <= template["metadata"]["labels"].items()
        assert not match.items() <= own.items()
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= own.items()
    (container,) = pod["spec"]["containers"]
    compile(container["args"][0], "args", "exec")
    host = service["metadata"]["name"].upper().replace("-", "_") + "_SERVICE_HOST"
    assert f'host = "$({host})"' in container["args"][0]
    assert container["image"] == template["spec"]["containers"][0]["image"]


def test_dashboards_carry_what_the_sidecar_looks_for(render):
    assert not by_kind(render(), "ConfigMap")
    made = by_kind(render("dashboards.enabled=true"), "ConfigMap")
    files = {}
    for each in made:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Ullage"}
        files |= each["data"]
    assert files == {
        path.name: path.read_text() for path in (CHART / "files" / "dashboards").iterdir()
    }
    assert len(made) == len(files) == 6


def test_named_namespaces_need_no_cluster_role(render):
    objects = render("watch.namespaces={a,b}")
    assert by_kind(objects, "ClusterRole") == by_kind(objects, "ClusterRoleBinding") == []
    roles = [r for r in by_kind(objects, "Role") if not r["metadata"]["name"].endswith("-lease")]
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    bound = [
        (b["roleRef"]["kind"], b["metadata"]["namespace"]) for b in by_kind(objects, "RoleBinding")
    ]
    own = [r["metadata"]["namespace"] for r in by_kind(objects, "Role") if r not in roles]
    assert sorted(bound) == sorted(("Role", name) for name in ["a", "b", *own])
    assert len(own) == 1
    (deployment,) = by_kind(objects, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(arguments)


def test_the_role_grants_exactly_what_the_operator_does(render):
    """Owned kinds from the manifests' builders, watches from the handlers."""
    used = {
        ("serving.ullage.dev", "llmservices"): {"get", "list", "watch"},
        ("serving.ullage.dev", "llmservicebases"): {"get", "list", "watch"},
        ("serving.ullage.dev", "llmservices/status"): {"patch"},
        # Owner references with blockOwnerDeletion need it where that admission check is on.
        ("serving.ullage.dev", "llmservices/finalizers"): {"update"},
        ("", "pods"): {"list", "watch", "delete"},
        ("", "nodes"): {"get"},
        ("events.k8s.io", "events"): {"list", "create"},
    }
    assert {(obj["apiVersion"], obj["kind"]) for obj in planned()} == {k[:2] for k in OWNED}
    for kind in OWNED:
        used[kind.group, kind.plural] = {"get", "list", "watch", "create", "patch", "delete"}
    assert rules(render()) == used


def test_named_namespaces_have_the_same_rights_but_those_of_the_cluster(render):
    of_all = rules(render())
    assert of_all.pop(("", "nodes"))
    assert rules(render("watch.namespaces={a}")) == of_all


def planned():
    """Every object of a service with all that it can have."""
    pool = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}
    manifest = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "s", "namespace": "n", "uid": "u"},
        "spec": {
            "model": {"source": "hf://org/m", "name": "m"},
            "router": {
                "autoscaling": {"maxReplicas": 2},
                "gateway": {"parentRefs": [{"name": "g"}]},
            },
            "pools": {
                "single": {
                    "autoscaling": {"maxReplicas": 2},
                    "modelCache": {"claimName": "weights", "warm": True},
                },
                "large": pool
                | {
                    "role": "Large",
                    "autoscaling": {
                        "maxReplicas": 2,
                        "provider": "KEDA",
                        "prometheusURL": "http://prometheus:9090",
                    },
                },
            },
        },
    }
    observed = Observed(
        now=datetime.now(UTC), serves=frozenset(k.name for k in OWNED if k.optional)
    )
    return plan(parse(manifest), observed, Settings()).apply


def test_only_the_own_lease_may_be_changed(render):
    objects = render("watch.namespaces={a,b}")
    (role,) = [r for r in by_kind(objects, "Role") if r["metadata"]["name"].endswith("-lease")]
    change, make = role["rules"]
    (deployment,) = by_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--lease-name={change['resourceNames'][0]}" in container["args"]
    assert (change["verbs"], make["verbs"]) == (["get", "update"], ["create"])
    assert role["metadata"]["namespace"] == deployment["metadata"]["namespace"]


def test_whoever_grants_rights_by_hand_is_told_of_all_of_them():
    """docs/guide/install.md names each file and each list of rules, lest only some are copied."""
    told = (ROOT / "docs" / "guide" / "install.md").read_text()
    texts = {path.name: path.read_text() for path in (CHART / "templates").glob("*.*")}
    of_people = "aggregated-roles.yaml"
    written = {name for name, text in texts.items() if "verbs:" in text}
    assert written == {"_helpers.tpl", of_people}
    lists = re.findall(r'define "(ullage\.\w*[rR]ules)"', texts["_helpers.tpl"])
    assert {f'include "{name}"' in texts["rbac.yaml"] for name in lists} == {True}
    assert all(f"`{name}`" in told for name in ("templates/_helpers.tpl", *lists))


def test_no_wildcards_and_no_secrets(render):
    for (group, resource), verbs in rules(render()).items():
        assert "*" not in {group, resource, *verbs}
        assert resource not in {"secrets", "pods/exec", "roles", "clusterroles"}


def test_several_operators_are_spread_and_not_drained_together(render):
    (budget,) = by_kind(render("replicas=2"), "PodDisruptionBudget")
    (deployment,) = by_kind(render("replicas=2"), "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    spread = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert spread["preferredDuringSchedulingIgnoredDuringExecution"]
    # A single one may be moved: a budget would keep its node from being drained.
    assert by_kind(render(), "PodDisruptionBudget") == []


def test_without_an_election_there_is_never_a_second_operator(render, helm):
    objects = render("leaderElection.enabled=false")
    (deployment,) = by_kind(objects, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert not [obj for obj in objects if obj["metadata"]["name"].endswith("-lease")]
    refused = ("--set", "imageRegistry=localhost,leaderElection.enabled=false,replicas=2")
    done = helm("template", "release", str(CHART), *refused)
    assert done.returncode != 0
    assert "several operators need leaderElection" in done.stderr
    (deployment,) = by_kind(render(), "Deployment")
    # Fields that the chart does not set would stay with Recreate, which forbids them.
    shares = {"maxSurge": "25%", "maxUnavailable": "25%"}
    assert deployment["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": shares}


def test_names_of_digits_stay_names(helm, tmp_path):
    values = tmp_path / "values.yaml"
    given = {
        "imageRegistry": "registry.example/ullage",
        "fullnameOverride": "12",
        "nameOverride": "34",
        "watch": {"namespaces": ["56"]},
        "metricsNamespace": "78",
        "priorityClassName": "90",
        "serviceAccount": {"name": "91"},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dcgmCounters": {"enabled": True, "namespace": "7"},
        "dashboards": {"enabled": True},
        "replicas": 2,
    }
    values.write_text(yaml.safe_dump(given))
    done = helm("template", "456", str(CHART), "--namespace", "123", "--values", str(values))
    assert done.returncode == 0, done.stderr
    objects = [obj for obj in yaml.safe_load_all(done.stdout) if obj]
    assert {obj["kind"] for obj in objects} >= {"Role", "NetworkPolicy", "PodMonitor", "Pod"}
    for obj in objects:
        labels = obj["metadata"].get("labels", {})
        names = (obj["metadata"]["name"], obj["metadata"].get("namespace", ""), *labels.values())
        assert all(isinstance(name, str) for name in names), names
        if not obj["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes_validate.validate(obj, "1.35", strict=True)


def test_no_number_of_rollouts_is_too_large_for_the_operator(helm, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text("imageRegistry: registry.example/ullage\nmaxRollouts: 1000000\n")
    shown = ("--show-only", "templates/deployment.yaml")
    done = helm("template", "release", str(CHART), "--values", str(values), *shown)
    assert done.returncode == 0, done.stderr
    [container] = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    assert Settings.from_env(environment).max_rollouts == 1_000_000


@pytest.mark.parametrize("values", VALUE_SETS)
def test_the_operator_understands_its_arguments(render, values):
    (deployment,) = by_kind(render("crds.enabled=false", *values), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["ullage-operator"]
    assert arguments_parser().parse_args(container["args"])


def test_users_that_are_null_are_left_to_the_cluster(render):
    names = ("runAsUser", "runAsGroup", "fsGroup")
    values = (f"podSecurityContext.{name}=null" for name in names)
    (deployment,) = by_kind(render("crds.enabled=false", *values), "Deployment")
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_test_of_a_release_reaches_services_of_both_families(render, host):
    (pod,) = (obj for obj in render("crds.enabled=false") if obj["kind"] == "Pod")
    [container] = pod["spec"]["containers"]
    [script] = container["args"]
    port = free_port()
    stop = serve_metrics(CollectorRegistry(), port, host, lambda: True)
    try:
        script = re.sub(r"\$\([A-Z_]+_SERVICE_HOST\)", host, script).replace("9090", str(port))
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        stop()
    assert (done.returncode, done.stdout) == (0, "ready\n\n"), done.stderr


def images(render, *values):
    (deployment,) = by_kind(render("crds.enabled=false", *values), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {item["name"]: item.get("value") for item in container["env"]}
    return container["image"], given["ULLAGE_ROUTER_IMAGE"], given["ULLAGE_ENGINE_IMAGE"]


def test_images_are_named_by_tag_or_digest(render):
    digest = "sha256:" + "0a" * 32
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    operator, engine = (f"registry.example/ullage/{n}:{version}" for n in ("operator", "engine"))
    assert images(render) == (operator, operator, engine)
    pinned = images(render, f"image.digest={digest}", "image.repository=r.example/o")
    assert pinned == (f"r.example/o:{version}@{digest}",) * 2 + (engine,)
    own = images(render, "routerImage.repository=r.x/r", "routerImage.tag=v1", "engineImage.tag=v2")
    assert own == (operator, "r.x/r:v1", "registry.example/ullage/engine:v2")
    other = images(render, "routerImage.tag=v1")[:2]
    assert other == (operator, "registry.example/ullage/operator:v1")
    digested = images(render, f"routerImage.digest={digest}", "image.tag=v3")
    assert digested[:2] == ("registry.example/ullage/operator:v3", f"{operator}@{digest}")


WITHOUT_REGISTRY = [
    ((), "image.repository: no image is named; set imageRegistry"),
    (("image.repository=r.example/o",), "engineImage.repository: no image is named"),
    (("imageRegistry=ullage",), "imageRegistry: ullage/operator names no registry"),
    (
        ("imageRegistry=localhost", "engineImage.repository=ullage/engine"),
        "engineImage.repository: ullage/engine names no registry, so nodes would ask Docker Hub",
    ),
    (
        ("imageRegistry=localhost", "vllmEngineImage.repository=vllm"),
        "vllmEngineImage.repository: vllm names no registry",
    ),
    (
        ("imageRegistry=localhost", "cudaEngineImage.repository=a/b"),
        "cudaEngineImage.repository: a/b names no registry",
    ),
    (
        ("imageRegistry=localhost", "routerImage.repository=a/b"),
        "routerImage.repository: a/b names no registry",
    ),
    (
        ("image.repository=r.x/o", "engineImage.repository=r.x/e", "cudaEngineImage.tag=v1"),
        "set cudaEngineImage.repository or imageRegistry",
    ),
]


@pytest.mark.parametrize(("values", "said"), WITHOUT_REGISTRY)
def test_no_image_is_asked_of_a_registry_that_nobody_named(helm, values, said):
    sets = [part for value in values for part in ("--set", value)]
    done = helm("template", "release", str(CHART), *sets)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("registry", ["localhost/ullage", "127.0.0.1:5000", "r.example/a/b/"])
def test_a_registry_is_a_host_with_or_without_a_folder(render, registry):
    operator, router, engine = images(render, f"imageRegistry={registry}")
    folder = registry.removesuffix("/")
    assert operator == router
    assert operator.startswith(f"{folder}/operator:")
    assert engine.startswith(f"{folder}/engine:")


def settings_of(render, *values):
    (deployment,) = by_kind(render("crds.enabled=false", *values), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return Settings.from_env({e["name"]: e.get("value", "") for e in container["env"]})


def test_engines_with_gpus_have_the_image_with_cuda(render):
    manifest = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "a"},
        "spec": {"model": {"source": "hf://a/b", "name": "m"}, "pools": {"single": {"gpus": 1}}},
    }
    on_gpus = parse(manifest).spec
    on_cpus = parse(manifest | {"spec": {**manifest["spec"], "device": "CPU"}}).spec
    usual = settings_of(render)
    assert engine_image(on_gpus, usual).startswith("registry.example/ullage/engine-cuda:")
    assert engine_image(on_cpus, usual).startswith("registry.example/ullage/engine:")
    alone = settings_of(
        render, "imageRegistry=", "image.repository=r.x/o", "engineImage.repository=r.x/e"
    )
    assert engine_image(on_gpus, alone).startswith("r.x/e:")
    own = settings_of(render, "cudaEngineImage.repository=r.x/c", "cudaEngineImage.tag=v2")
    assert engine_image(on_gpus, own) == "r.x/c:v2"


def test_an_image_with_vllm_is_a_choice(render, helm):
    assert settings_of(render).vllm_engine_image == ""
    named = settings_of(render, "vllmEngineImage.repository=r.x/v", "vllmEngineImage.tag=v2")
    assert named.vllm_engine_image == "r.x/v:v2"
    alone = ("--set", "imageRegistry=localhost", "--set", "vllmEngineImage.tag=v2")
    done = helm("template", "release", str(CHART), *alone)
    assert done.returncode != 0
    assert "set vllmEngineImage.repository" in done.stderr


def test_the_charts_version_of_the_operator_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_the_operator_knows_its_namespace(render):
    (deployment,) = by_kind(render("crds.enabled=false"), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [found] = [e for e in container["env"] if e["name"] == "ULLAGE_OPERATOR_NAMESPACE"]
    assert found["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}


def test_pull_secrets_reach_the_operator_by_name(render):
    values = ("imagePullSecrets[0].name=a", "imagePullSecrets[1].name=b")
    (deployment,) = by_kind(render("crds.enabled=false", *values), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    environment = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert Settings.from_env(environment).image_pull_secrets == ("a", "b")


def test_the_definition_goes_with_the_chart_only_where_asked(render):
    for crd in by_kind(render("crds.keep=false"), "CustomResourceDefinition"):
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] != "keep"


def test_only_those_named_may_read_the_metrics(render):
    (policy,) = by_kind(render(), "NetworkPolicy")
    (deployment,) = by_kind(render(), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    (rule,) = policy["spec"]["ingress"]
    named = {"kubernetes.io/metadata.name": "monitoring"}
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": named}}]
    assert {"name": "ULLAGE_METRICS_NAMESPACE", "value": "monitoring"} in container["env"]
    (closed,) = by_kind(render("metricsNamespace="), "NetworkPolicy")
    assert closed["spec"]["ingress"] == []
    assert "metrics" in {port["name"] for port in container["ports"]}
    peer = "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b"
    (policy,) = by_kind(render(peer), "NetworkPolicy")
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]


def test_an_operator_kept_to_its_peers_still_reaches_services_and_the_api(render):
    values = ("networkPolicy.egress.enabled=true", "networkPolicy.egress.apiServerPorts={16443}")
    (policy,) = by_kind(render(*values), "NetworkPolicy")
    dns, api, services = policy["spec"]["egress"]
    assert {port["protocol"] for port in dns["ports"]} == {"UDP", "TCP"}
    assert api["ports"] == [{"port": 16443, "protocol": "TCP"}]
    (peer,) = services["to"]
    for component in ("engine", "router"):
        labels = selector("s", component)
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_an_operator_kept_to_its_peers_still_reaches_its_collector(render):
    reached = {
        ("http://collector:4317", "grpc"): 4317,
        ("https://traces.example.com/v1/traces", "http"): 443,
        ("http://collector", "http"): 80,
    }
    for (endpoint, protocol), port in reached.items():
        objects = render(
            "networkPolicy.egress.enabled=true",
            f"tracing.endpoint={endpoint}",
            f"tracing.protocol={protocol}",
        )
        (policy,) = by_kind(objects, "NetworkPolicy")
        _, _, collector, _ = policy["spec"]["egress"]
        assert collector == {"ports": [{"port": port, "protocol": "TCP"}]}, endpoint
