"""Things break under streams: a worker process, a pod, the operator. Clients get whole answers."""

from ullage_cluster.client import Client
from ullage_cluster.faults import kill_worker
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
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        for engine in set(streams.started(len(PROMPTS))):
            kill_worker(kubectl, engine)
        answers = streams.answers()
    assert [(a.status, a.error, a.text) for a in answers] == [
        (200, "", a.text) for a in undisturbed
    ]
    assert restarts(service.pods()) == before
    service.settle()


def test_a_pod_that_is_gone_at_once_comes_back(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        victim = streams.started(len(PROMPTS))[0]
        was = kubectl.uid("pod", victim)
        kubectl("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")
        [asked] = client.ask(service, ["Name a colour."], max_tokens=8)
        # The router may not know yet that the engine is lost: then it says to try again.
        assert asked.is_whole or asked.status == 503, asked
        answers = streams.answers()
    # The other engine's streams go on; those of the lost one end with an error, not with silence.
    assert all(a.is_whole or a.error for a in answers), answers
    assert all(a.is_whole for a in answers if a.engine != victim), answers
    until(lambda: kubectl.uid("pod", victim) not in ("", was), "the pod is made anew")
    service.settle()
    assert all(a.is_whole for a in client.ask(service, PROMPTS, max_tokens=8))


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
