"""The chart's values: each is commented, closed by the schema, and changes what is rendered."""

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "ullage"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
DIGEST = "sha256:" + "0a" * 32
RANDOM_SELECTOR = {"matchLabels": {"a": "b"}}
FLOATING = ("podSecurityContext", "securityContext", "resources")
"""Values that hold a Kubernetes type of their own: one sample for the whole of each."""

SAMPLES: dict[str, Any] = {
    "replicas": 2,
    "leaderElection.enabled": False,
    "leaderElection.leaseSeconds": 5,
    "imageRegistry": "registry.example/all",
    "image.repository": "registry.example/operator",
    "image.tag": "v2",
    "image.digest": DIGEST,
    "image.pullPolicy": "Always",
    "engineImage.repository": "registry.example/engine",
    "engineImage.tag": "v2",
    "engineImage.digest": DIGEST,
    "cudaEngineImage.repository": "registry.example/engine-cuda",
    "cudaEngineImage.tag": "v2",
    "cudaEngineImage.digest": DIGEST,
    "vllmEngineImage.repository": "registry.example/engine-vllm",
    "vllmEngineImage.tag": "v2",
    "vllmEngineImage.digest": DIGEST,
    "routerImage.repository": "registry.example/router",
    "routerImage.tag": "v2",
    "routerImage.digest": DIGEST,
    "imagePullSecrets": [{"name": "registry"}],
    "nameOverride": "other",
    "fullnameOverride": "other",
    "crds.enabled": True,
    "crds.keep": False,
    "watch.namespaces": ["a"],
    "maxRollouts": 5,
    "logLevel": "debug",
    "tracing.endpoint": "http://collector:4317",
    "tracing.protocol": "http",
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
    "serviceAccount.create": False,
    "serviceAccount.name": "mine",
    "serviceAccount.annotations": {"role": "x"},
    "rbac.create": False,
    "podAnnotations": {"note": "z"},
    "podLabels": {"team": "x"},
    "podSecurityContext": {"fsGroup": 1000, "seccompProfile": {"type": "Unconfined"}},
    "securityContext": {"runAsUser": 1000, "capabilities": {"add": ["SYS_PTRACE"]}},
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "infra", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}]}
                ]
            }
        },
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "zone", "labelSelector": RANDOM_SELECTOR}
            ]
        },
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": RANDOM_SELECTOR,
        }
    ],
    "priorityClassName": "system-cluster-critical",
    "podDisruptionBudget.enabled": False,
    "podDisruptionBudget.maxUnavailable": "50%",
    "networkPolicy.enabled": False,
    "mesh": "linkerd",
    "metricsNamespace": "observability",
    "networkPolicy.metricsFrom": [{"namespaceSelector": RANDOM_SELECTOR}],
    "networkPolicy.egress.enabled": True,
    "networkPolicy.egress.apiServerPorts": [16443],
    "podMonitor.enabled": True,
    "podMonitor.interval": "10s",
    "podMonitor.additionalLabels": {"release": "prometheus"},
    "prometheusRule.enabled": True,
    "prometheusRule.additionalLabels": {"release": "prometheus"},
    "prometheusRule.gpu": False,
    "prometheusRule.runbooks": "https://wiki.example.com/runbooks",
    "dcgmCounters.enabled": True,
    "dcgmCounters.namespace": "monitoring",
    "dashboards.enabled": True,
    "dashboards.label": "grafana",
    "dashboards.labelValue": "yes",
    "dashboards.folder": "LLMs",
    "rbac.aggregate": False,
}
"""Another value than the default, which for crds.enabled is the fixture's, for everything."""

NEEDED: dict[str, dict[str, Any]] = {
    "crds.keep": {"crds.enabled": True},
    "vllmEngineImage.tag": {"vllmEngineImage.repository": "r.x/v"},
    "vllmEngineImage.digest": {"vllmEngineImage.repository": "r.x/v"},
    "tracing.protocol": {"tracing.endpoint": "http://collector:4318"},
    "podDisruptionBudget.enabled": {"replicas": 2},
    "podDisruptionBudget.maxUnavailable": {"replicas": 2},
    "networkPolicy.egress.apiServerPorts": {"networkPolicy.egress.enabled": True},
    "podMonitor.interval": {"podMonitor.enabled": True},
    "podMonitor.additionalLabels": {"podMonitor.enabled": True},
    "prometheusRule.additionalLabels": {"prometheusRule.enabled": True},
    "prometheusRule.gpu": {"prometheusRule.enabled": True},
    "prometheusRule.runbooks": {"prometheusRule.enabled": True},
    "dcgmCounters.namespace": {"dcgmCounters.enabled": True},
    "dashboards.label": {"dashboards.enabled": True},
    "dashboards.labelValue": {"dashboards.enabled": True},
    "dashboards.folder": {"dashboards.enabled": True},
}
"""Values that matter only together with others."""


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of all values; a map that is empty by default is one value."""
    found = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        is_group = isinstance(value, dict) and value and path not in FLOATING
        found += leaves(value, f"{path}.") if is_group else [path]
    return found


def nested(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in values.items():
        node = made
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return made


def test_there_is_a_sample_of_every_value():
    assert sorted(SAMPLES) == sorted(leaves(VALUES))


def test_every_value_changes_what_is_rendered(render_values, validate, subtests):
    for path, sample in SAMPLES.items():
        with subtests.test(path):
            needed = NEEDED.get(path, {})
            before = render_values(nested(needed))
            after = render_values(nested({**needed, path: sample}))
            assert before != after
            for obj in after:
                validate(obj)


def test_all_samples_together_make_valid_objects(render_values, validate):
    together = {
        path: value for path, value in SAMPLES.items() if not path.endswith((".enabled", ".create"))
    }
    enabled = {path: True for path in SAMPLES if path.endswith((".enabled", ".create"))}
    objects = render_values(nested({**together, **enabled}))
    kinds = {obj["kind"] for obj in objects}
    assert {"PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "PrometheusRule"} <= kinds
    for obj in objects:
        validate(obj)


def comment_above(lines: list[str], at: int) -> str:
    """The comment that ends right above a line."""
    above = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        above.append(lines[at].strip())
    return "\n".join(reversed(above))


def test_every_value_and_every_group_is_commented():
    """Values with `# --`, as documentation tools read them; groups with a plain comment."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    stack: list[tuple[int, str]] = []
    paths = set(leaves(VALUES))
    wanted = set()
    for at, line in enumerate(lines):
        name, colon, _ = line.strip().partition(":")
        if not colon or line.strip().startswith(("#", "-")):
            continue
        indent = len(line) - len(line.lstrip())
        stack = [(depth, outer) for depth, outer in stack if depth < indent] + [(indent, name)]
        path = ".".join(outer for _, outer in stack)
        if path.split(".")[0] in FLOATING and "." in path:
            continue
        comment = comment_above(lines, at)
        assert comment.startswith("# --") is (path in paths), f"{path}: {comment!r}"
        assert comment, f"{path}: {comment!r}"
        assert comment.rstrip().endswith("."), f"{path}: {comment!r}"
        wanted.add(path)
    assert paths <= wanted


def described(schema: Any, where: str = "") -> Any:
    """Every schema of an object, with the path to it."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield where, schema
        for name, part in schema.items():
            yield from described(part, f"{where}/{name}")
    if isinstance(schema, list):
        for at, part in enumerate(schema):
            yield from described(part, f"{where}/{at}")


def test_every_object_of_the_schema_is_closed():
    """Either to unknown names, or, for maps, to values of another type."""
    for where, schema in described(SCHEMA):
        if where != "/properties/global":
            assert "additionalProperties" in schema, where
            assert schema["additionalProperties"] is not True, where


def test_the_schema_knows_every_value_and_no_other():
    def compare(schema: dict[str, Any], values: dict[str, Any], where: str) -> None:
        properties = dict(schema["properties"])
        if not where:
            assert properties.pop("global")
        assert set(properties) == set(values), where
        for name, value in values.items():
            if isinstance(value, dict) and value and name not in FLOATING:
                compare(properties[name], value, f"{where}.{name}")

    compare(SCHEMA, VALUES, "")


WRONG: list[tuple[str, Any]] = [
    ("nonsense", 1),
    ("image.tga", "x"),
    ("image.digest", "sha256:short"),
    ("image.pullPolicy", "Sometimes"),
    ("image.repository", "ullage/operator"),
    ("imageRegistry", "ullage"),
    ("imageRegistry", ""),
    ("replicas", 0),
    ("leaderElection.leaseSeconds", 0.5),
    ("logLevel", "loud"),
    ("watch.namespaces", ["A_B"]),
    ("watch.namespaces", ["a", "a"]),
    ("imagePullSecrets", ["registry"]),
    ("extraEnv", [{"name": "A", "valeu": "b"}]),
    ("podLabels", {"app.kubernetes.io/name": "mine"}),
    ("podSecurityContext.runAsRoot", True),
    ("securityContext.capabilities", {"keep": ["ALL"]}),
    ("resources.limit", {"memory": "1Gi"}),
    ("resources.limits", {"memory": "1GiB"}),
    ("tolerations", [{"key": "a", "operator": "Sometimes"}]),
    ("affinity.podAffinity.required", []),
    ("topologySpreadConstraints", [{"topologyKey": "zone"}]),
    ("podDisruptionBudget.maxUnavailable", 0),
    ("networkPolicy.metricsFrom", [{"podSelectors": {}}]),
    ("networkPolicy.egress.apiServerPorts", []),
    ("podMonitor.interval", "soon"),
]


def test_a_wrong_value_is_refused_by_its_name(helm, tmp_path, subtests):
    values = tmp_path / "values.yaml"
    for path, wrong in WRONG:
        values.write_text(yaml.safe_dump(nested({"imageRegistry": "r.example"} | {path: wrong})))
        done = helm("template", "release", str(CHART), "--values", str(values))
        with subtests.test(path, value=wrong):
            assert done.returncode != 0
            assert path.split(".")[0] in done.stderr, done.stderr
