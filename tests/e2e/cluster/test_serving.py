"""A service from `kubectl apply` to an answer, and what kubectl shows of it."""

import json
import re
from collections.abc import Callable

from ullage_cluster.client import Client
from ullage_cluster.kubectl import Kubectl, is_ready, names, until
from ullage_cluster.service import KIND, Service


def test_an_applied_service_becomes_ready_and_answers(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    kubectl("wait", "--for=condition=Ready", f"{KIND}/{service.name}", "--timeout=60s")
    (answer,) = client.ask(service, ["Name a colour."], max_tokens=12)
    assert answer.is_whole, answer
    assert answer.text.strip()
    assert answer.engine in names(service.pods())


def test_many_at_once_are_spread_over_all_engines(service: Service, client: Client) -> None:
    words = ("tea", "iron", "snow", "jazz", "moss", "clay", "wind", "silk")
    answers = client.ask(service, [f"Describe {word}." for word in words], max_tokens=24)
    assert [a for a in answers if not a.is_whole] == []
    assert {a.engine for a in answers} == set(names(service.pods()))


def test_engines_keep_kv_in_the_tiers_of_the_service(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    prompt = "Name a colour for each of these: " + ", ".join(f"thing {n}" for n in range(60))
    (answer,) = client.ask(service, [prompt], headers={"x-session-id": "one"}, max_tokens=2)
    assert answer.is_whole, answer
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9090/metrics').read().decode())"

    def tiers(pod: str, metric: str) -> dict[str, float]:
        text = kubectl("exec", pod, "--", "python3", "-c", read)
        samples = re.findall(rf'^ullage_kv_tier_{metric}{{.*tier="(\w+)".*}} (\S+)$', text, re.M)
        return {tier: float(value) for tier, value in samples}

    for pod in names(service.pods()):
        assert tiers(pod, "blocks").keys() == {"host", "remote", "file"}
    until(lambda: tiers(answer.engine, "blocks")["file"] > 10, "blocks of a session are in files")


def test_a_wrong_request_is_answered_with_the_field(service: Service, client: Client) -> None:
    (answer,) = client.ask(service, ["x"], max_tokens=-1)
    assert answer.status == 400
    assert "max_tokens" in answer.error


def test_kubectl_shows_the_state(kubectl: Kubectl, service: Service) -> None:
    header, row = kubectl("get", "llms", service.name).splitlines()
    assert header.split()[0] == "NAME"
    assert {"READY", "ROLLOUT"} <= set(header.split())
    assert row.split()[0] == service.name
    assert "True" in row
    status = service.status()
    conditions = {c["type"]: c for c in status["conditions"]}
    assert {"Ready", "Available", "Progressing", "Degraded"} <= set(conditions)
    assert conditions["Degraded"]["status"] == "False", conditions["Degraded"]
    generation = service.get()["metadata"]["generation"]
    assert {c["observedGeneration"] for c in conditions.values()} == {generation}


def test_everything_of_a_service_is_owned_by_it(kubectl: Kubectl, service: Service) -> None:
    kinds = "deployments,statefulsets,services,configmaps,serviceaccounts"
    kinds += ",networkpolicies,poddisruptionbudgets"
    owned = service.owned(kinds)
    assert {obj["kind"] for obj in owned} >= {"Deployment", "StatefulSet", "NetworkPolicy"}
    uid = service.get()["metadata"]["uid"]
    assert {o["uid"] for obj in owned for o in obj["metadata"]["ownerReferences"]} == {uid}


def test_pods_hold_no_token_and_run_unprivileged(kubectl: Kubectl, service: Service) -> None:
    pods = [*service.pods("engine"), *service.pods("router")]
    assert all(is_ready(pod) for pod in pods)  # though the namespace demands "restricted"
    reading = "import os; print(os.getuid(), os.path.exists('/var/run/secrets/kubernetes.io'))"
    name = service.pods()[0]["metadata"]["name"]
    assert kubectl("exec", name, "--", "python3", "-c", reading).split() == ["65532", "False"]


NO_IMAGE = "ullage/no-such-image:0"
"""Of engines that need not run."""


def test_engines_that_ask_for_nothing_are_not_the_first_to_be_evicted(
    make_service: Callable[..., Service],
) -> None:
    made = make_service("modest", image=NO_IMAGE, pools={"single": {"replicas": 1, "gpus": 1}})
    [pod] = until(made.pods, "its engine is there", 60)
    assert pod["status"]["qosClass"] == "Burstable"
    [container] = pod["spec"]["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_values_of_the_environment_are_in_no_configmap(
    kubectl: Kubectl, make_service: Callable[..., Service]
) -> None:
    value = "only-for-this-pod"
    container = {"name": "engine", "env": [{"name": "TOKEN", "value": value}]}
    pool = {"replicas": 1, "gpus": 1, "podTemplate": {"spec": {"containers": [container]}}}
    made = make_service("discreet", image=NO_IMAGE, pools={"single": pool})
    [pod] = until(made.pods, "its engine is there", 60)
    assert value in json.dumps(pod["spec"])
    until(lambda: len(made.owned("configmaps")) >= 3, "release, engine and router have one", 60)
    assert value not in json.dumps(made.owned("configmaps"))


def test_a_service_may_have_the_large_pool_alone(make_service: Callable[..., Service]) -> None:
    pool = {"replicas": 1, "resources": {"requests": {"cpu": "50m"}}}
    made = make_service("group", image=NO_IMAGE, pools={"large": pool})
    [pod] = until(made.pods, "its engine is there", 60)
    assert pod["metadata"]["name"] == "group-large-0"
    assert names(made.owned("statefulsets")) == ["group-large"]
    pools = until(lambda: made.status().get("pools"), "its status has pools", 60)
    assert pools.keys() == {"large"}
