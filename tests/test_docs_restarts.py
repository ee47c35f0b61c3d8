"""An edit of a service, or of the chart's values, restarts the pods that the guide says."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ullage_operator.api.naming import HTTP_ROUTE, ROUTER_SCALER
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"
PAGE = GUIDE / "operator.md"
ROW = re.compile(r"^\| (nothing|routers|engines|both) \| (.*) \|$", re.MULTILINE)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
POOL = "pools.single."
SERVICE: dict[str, Any] = {
    "model": {"source": "hf://a/b-8b", "name": "m"},
    "pools": {"single": {"gpus": 1}, "large": {"role": "Large"}},
    "router": {"files": {}, "replicas": 1, "gateway": {"parentRefs": [{"name": "g"}]}},
    "tls": {"router": {"secretName": "front"}, "engines": {"secretName": "engines"}},
    "tickets": {"secretName": "keys"},
    "observability": {"tracing": {"endpoint": "http://collector:4317"}},
}
OTHER_SERVICES: Mapping[str, dict[str, Any]] = {
    "adapters": SERVICE | {"memory": {"maxLoras": 2}},
    "modelPullPolicy": SERVICE | {"model": {"source": "oci://registry.example/m:1", "name": "m"}},
    "router.autoscaling": SERVICE | {"router": {"replicas": 1}},
    f"{POOL}modelCache.warm": SERVICE | {"pools": {"single": {"modelCache": {"claimName": "c"}}}},
    f"{POOL}persistentVolumeClaimRetentionPolicy": SERVICE
    | {"pools": {"single": {"modelCache": {"claimTemplate": {"size": "1Gi"}}}}},
    "router.replicas": SERVICE | {"router": {"replicas": 1}},
}
"""The service before the edit of a field that the service above could not have, or not use."""

EDITS: Mapping[str, Any] = {
    "adapters": [{"name": "a", "source": "hf://a/lora", "rank": 8}],
    "replicas": 3,
    "router.replicas": 3,
    "router.autoscaling": {"maxReplicas": 3},
    "stop": True,
    "router.service": {"type": "NodePort"},
    "router.gateway.parentRefs": [{"name": "other"}],
    "slo.errorPercent": 1,
    "healing.restartsPerHour": 7,
    "rollout.maxWait": "6m",
    "rollout.answers": {"prompts": "Sampled"},
    "observability.podMonitor.interval": "30s",
    "observability.prometheusRule.enabled": False,
    "observability.metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "serviceAccount.annotations": {"a": "b"},
    f"{POOL}replicas": 3,
    f"{POOL}autoscaling": {"maxReplicas": 3},
    f"{POOL}modelCache.warm": True,
    f"{POOL}persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete"},
    "routing.queue.maxRequests": 9,
    "prompts.cleanse.html": True,
    "cascade": {"steps": [{"service": "small"}]},
    "tenants": {"secretName": "tenants"},
    "streaming.keepalive": "9s",
    "slo.ttftP95": "9s",
    "slo.e2eP95": "29s",
    "tls.router.clientCASecretName": "clients",
    "tls.engines.routerSecretName": "others",
    "tls.engines.serverName": "engines.example",
    "tickets.ttl": "20s",
    "observability.console.enabled": True,
    "rollout.answers.configMapName": "questions",
    "router.publicStats": True,
    "router.resources": {"requests": {"cpu": "2"}},
    f"{POOL}role": "Overflow",
    "model.maxModelLen": 9000,
    "engine": "Native",
    "vllm.args": {"enforce_eager": True},
    "adapterClaims": ["claim"],
    "image": "registry.example/engine:2",
    "modelPullPolicy": "Always",
    "s3.region": "eu-west-1",
    "device": "CPU",
    "batching.maxSequences": 9,
    "degrade.hysteresisPercent": 6,
    "limits.stepDeadline": "31s",
    "allowFaultInjection": True,
    "memory.hostKV": "1Gi",
    "observability.profiling.enabled": True,
    f"{POOL}memory.maxKV": "1Gi",
    f"{POOL}startTimeout": "31m",
    "limits.maxOutputTokens": 99,
    "limits.requestTimeout": "31s",
    "limits.totalTimeout": "8m",
    "memory.thresholdPercent": 84,
    "memory.safetyReserve": "3Gi",
    "tls.engines.secretName": "others",
    "tickets.secretName": "others",
    "tickets.required": True,
    "imagePullSecrets": [{"name": "registry"}],
    "securityContext": {"runAsUser": 1000},
    "serviceAccount.name": "default",
    "observability.logLevel": "Debug",
    "observability.tracing.samplePercent": 10,
}
"""New values of fields, one for each field or section that the page names."""

VALUES: Mapping[str, tuple[dict[str, Any], Settings]] = {
    "engineImage": ({"device": "CPU"}, Settings(engine_image="registry.example/engine:2")),
    "cudaEngineImage": ({}, Settings(cuda_engine_image="registry.example/engine-cuda:2")),
    "vllmEngineImage": ({"engine": "VLLM"}, Settings(vllm_engine_image="registry.example/vllm:2")),
    "image": ({}, Settings(router_image="registry.example/operator:2")),
    "routerImage": ({}, Settings(router_image="registry.example/router:2")),
    "image.pullPolicy": ({}, Settings(image_pull_policy="Always")),
    "imagePullSecrets": ({}, Settings(image_pull_secrets=("registry",))),
    "mesh": ({}, Settings(mesh="istio")),
    "ULLAGE_DNS_LAG": ({}, Settings(dns_lag_s=60.0)),
    "logLevel": ({}, Settings(log_level="debug")),
    "maxRollouts": ({}, Settings(max_rollouts=9)),
    "metricsNamespace": ({}, Settings(metrics_namespace="other")),
    "prometheusRule.runbooks": ({}, Settings(runbooks="https://wiki.example.com")),
}
"""Values of the chart: fields of a service that they concern, and the operator's settings then."""


def edited(path: str, value: Any) -> dict[str, Any]:
    """Return the spec of the service with another value of one field."""
    spec = deepcopy(OTHER_SERVICES.get(path, SERVICE))
    *above, name = path.split(".")
    section = spec
    for part in above:
        section = section.setdefault(part, {})
    section[name] = value
    if path == "rollout.answers.configMapName":
        section["prompts"] = "ConfigMap"
    return spec


def pod_templates(spec: dict[str, Any], settings: Settings | None = None) -> dict[str, str]:
    """Return the pod templates of routers and of the engines of the pool single, as JSON."""
    manifest = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "demo", "namespace": "models", "uid": "u", "generation": 1},
        "spec": spec,
    }
    observed = Observed(now=NOW, serves=frozenset((HTTP_ROUTE, ROUTER_SCALER)))
    objects = plan(parse(manifest), observed, settings or Settings()).apply
    names = {"demo-router": "routers", "demo-single": "engines"}
    return {
        names[each["metadata"]["name"]]: json.dumps(each["spec"]["template"], sort_keys=True)
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet") and each["metadata"]["name"] in names
    }


def restarted(before: dict[str, str], after: dict[str, str]) -> str:
    """Return the word of the page for the templates that differ."""
    changed = [name for name, template in before.items() if after[name] != template]
    return {0: "nothing", 1: changed[0] if changed else "", 2: "both"}[len(changed)]


def documented(rows: Mapping[str, str], path: str) -> str:
    """Return the restart that the page names for a field: that of its longest named prefix."""
    if path.endswith("replicas"):
        return rows["replicas"]
    own = path.removeprefix(POOL)
    names = [name for name in rows if own == name or own.startswith(f"{name}.")]
    return rows[max(names, key=len)] if names else "engines" if path.startswith(POOL) else ""


def rows_of(page: str) -> dict[str, str]:
    """Return the restart by field, from the table."""
    section = page[page.index("## What an edit restarts") : page.index("### DNS")]
    return {
        name: word
        for word, cell in ROW.findall(section)
        for name in re.findall(r"`([\w.]+)`", cell)
    }


def test_an_edit_restarts_the_pods_that_the_page_says() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    usual = pod_templates(SERVICE)
    wrong = []
    for path, value in EDITS.items():
        before = pod_templates(OTHER_SERVICES[path]) if path in OTHER_SERVICES else usual
        actual = restarted(before, pod_templates(edited(path, value)))
        if actual != (said := documented(rows, path)):
            wrong.append(f"{path} restarts {actual}; the page says {said or 'nothing of it'}")
    assert not wrong, "\n".join(wrong)


def test_every_field_in_the_table_is_edited_here() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    edits = [path.removeprefix(POOL) for path in EDITS]
    assert not [name for name in rows if not any(f"{e}.".startswith(f"{name}.") for e in edits)]


def test_the_values_of_the_chart_that_reach_pods_are_listed() -> None:
    page = (GUIDE / "install.md").read_text(encoding="utf-8")
    [sentence] = re.findall(r"these reach every service's pods: (.*?)\. For any", page)
    reaching = set()
    for name, (fields, settings) in VALUES.items():
        spec = {**SERVICE, **fields}
        if pod_templates(spec) != pod_templates(spec, settings):
            reaching.add(name)
    assert reaching == set(re.findall(r"`([\w.]+)`", sentence)) - {"extraEnv"}
