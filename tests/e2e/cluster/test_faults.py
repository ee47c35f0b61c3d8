"""Things break under streams: a worker process, a pod, the operator. Clients get whole answers."""

import json

import pytest
from ullage_cluster.client import Answer, Client
from ullage_cluster.faults import exhaust_memory, force_delete, hang, kill_worker, servers
from ullage_cluster.kubectl import Kubectl, names, restarts, until
from ullage_cluster.release import Release
from ullage_cluster.service import Service

PROMPTS = ("Tell a story about a lighthouse.", "Tell a story about an old map.")


def test_a_killed_worker_process_is_only_a_pause(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    undisturbed = client.ask(service, PROMPTS, max_tokens=160)
    assert all(a.is_whole for a in undisturbed), undisturbed
    before = restarts(service.pods())
    workers_before = worker_restarts(service)
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        for engine in set(streams.started(len(PROMPTS))):
            kill_worker(kubectl, engine)
        answers = streams.answers()
    assert outcomes(answers) == outcomes(undisturbed)
    assert restarts(service.pods()) == before
    until(lambda: worker_restarts(service) > workers_before, "the status counts it", 60)
    until(lambda: "WorkerRestarted" in events(kubectl, service), "an Event tells of it", 60)
    service.settle()


def worker_restarts(service: Service) -> int:
    return int(service.status()["pools"]["single"]["workerRestarts"])


def events(kubectl: Kubectl, service: Service) -> list[str]:
    """Reasons of the service's Events."""
    selected = f"involvedObject.kind=LLMService,involvedObject.name={service.name}"
    text = kubectl("get", "events", "--field-selector", selected, "--output", "json")
    return [str(event["reason"]) for event in json.loads(text)["items"]]


def test_streams_outlive_a_pod_that_is_gone_at_once(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    undisturbed = client.ask(service, PROMPTS, max_tokens=160)
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        victim = streams.started(len(PROMPTS))[0]
        was = kubectl.uid("pod", victim)
        force_delete(kubectl, victim)
        [asked] = client.ask(service, ["Name a colour."], max_tokens=8)
        # The router may not know yet that the engine is lost: then it says to try again.
        assert asked.is_whole or asked.status == 503, asked
        answers = streams.answers()
    assert outcomes(answers) == outcomes(undisturbed)
    until(lambda: kubectl.uid("pod", victim) not in ("", was), "the pod is made anew")
    service.settle()


def test_streams_outlive_an_engine_that_is_killed_for_memory(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    undisturbed = client.ask(service, PROMPTS, max_tokens=160)
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        victim = streams.started(len(PROMPTS))[0]
        before = restarts([kubectl.get("pod", victim)])
        exhaust_memory(kubectl, victim)
        answers = streams.answers()
    assert outcomes(answers) == outcomes(undisturbed)
    until(lambda: restarts([kubectl.get("pod", victim)]) > before, "the container is started anew")
    [status] = kubectl.get("pod", victim)["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["reason"] == "OOMKilled", status
    service.settle()


def test_streams_outlive_a_server_that_hangs(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    pods = names(service.pods())
    if not all(servers(kubectl.uid("pod", name)) for name in pods):
        pytest.skip("the nodes are other machines: their processes cannot be stopped from here")

    undisturbed = client.ask(service, PROMPTS, max_tokens=160)
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        victim = streams.started(len(PROMPTS))[0]
        before = restarts([kubectl.get("pod", victim)])
        hang(servers(kubectl.uid("pod", victim)))
        answers = streams.answers()

    assert outcomes(answers) == outcomes(undisturbed)
    until(lambda: restarts([kubectl.get("pod", victim)]) > before, "its probe has it restarted")
    service.settle()


def test_streams_outlive_a_rollout_that_does_not_drain(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    """Every engine is gone in the moment in which it should begin to drain."""
    texts = {answer.text for answer in client.ask(service, PROMPTS, max_tokens=96)}
    before = {kubectl.uid("pod", name) for name in names(service.pods())}

    def are_replaced() -> bool:
        pods = service.pods()
        assert not [name for name in names(pods) if "-next-" in name], "no answer depends on it"
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                force_delete(kubectl, pod["metadata"]["name"])
        return not before & {pod["metadata"]["uid"] for pod in pods}

    with client.streams(service, PROMPTS, max_tokens=96, seconds=900, stop=True) as streams:
        streams.started(len(PROMPTS))
        service.edit(batching={"maxSequences": 12})
        until(are_replaced, "every engine is replaced")
        answers = streams.stop()
    assert [answer for answer in answers if not answer.is_whole] == []
    assert {answer.text for answer in answers} == texts
    service.settle()


def outcomes(answers: list[Answer]) -> list[tuple[int, str, str]]:
    return [(answer.status, answer.error, answer.text) for answer in answers]


def test_an_operator_that_dies_changes_nothing_and_another_takes_over(
    kubectl: Kubectl, release: Release, service: Service, client: Client
) -> None:
    def leader() -> str:
        holder = kubectl.get("lease", release.operator)["spec"]["holderIdentity"] or ""
        return next((name for name in operators() if name in holder), "")

    def operators() -> list[str]:
        return names(kubectl.listed("pods", release.selector))

    engines = {kubectl.uid("pod", name) for name in names(service.pods())}
    old = until(leader, "an operator leads")
    with client.streams(service, PROMPTS, max_tokens=96) as streams:
        streams.started(1)
        kubectl("delete", "pod", old, "--grace-period=0", "--force")
        assert all(a.is_whole for a in streams.answers())
    until(lambda: leader() not in ("", old), "another leads")
    router = f"{service.name}-router"
    was = kubectl.uid("service", router)
    kubectl("delete", "service", router)
    until(lambda: kubectl.uid("service", router) not in ("", was), "the other repairs", 120)
    service.settle()
    assert {kubectl.uid("pod", name) for name in names(service.pods())} == engines
