"""Engines and routers end under streams: scale-down, a node's drain, a rollout. Nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager

from ullage_cluster.client import Client
from ullage_cluster.kubectl import Kubectl, is_ready, names, until
from ullage_cluster.service import KIND, Service

PROMPTS = tuple(f"Tell a long story about {thing}." for thing in ("iron", "snow", "moss", "silk"))
LOAD_S = 60


def test_scale_down_loses_no_request(kubectl: Kubectl, service: Service, client: Client) -> None:
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        assert set(streams.started(len(PROMPTS))) == set(names(service.pods()))
        kubectl("scale", f"{KIND}/{service.name}", "--replicas=1")
        leaving = until(
            lambda: [p for p in service.pods() if "deletionTimestamp" in p["metadata"]],
            "an engine ends",
        )
        later = client.ask(service, PROMPTS[:2], max_tokens=16)
        assert all(a.is_whole for a in later), later
        answers = streams.answers()
    assert [a for a in answers if not a.is_whole] == []
    assert leaving[0]["metadata"]["name"] in {a.engine for a in answers}
    service.settle()
    assert len(service.pods()) == 1
    kubectl("scale", f"{KIND}/{service.name}", "--replicas=2")
    service.settle()
    assert len(service.pods()) == 2


def test_a_router_is_replaced_without_a_failed_request(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    engines = {kubectl.uid("pod", name) for name in names(service.pods())}
    with client.streams(service, PROMPTS[:2], max_tokens=24, seconds=LOAD_S) as streams:
        streams.started(2)
        old = names(service.pods("router"))
        # Read by routers alone: no engine may restart.
        service.edit(routing={"queue": {"maxRequests": 31, "timeout": "30s"}})
        until(lambda: not set(old) & set(names(service.pods("router"))), "the routers are new")
        answers = streams.answers()
    assert [a for a in answers if not a.is_whole] == []
    service.settle()
    assert {kubectl.uid("pod", name) for name in names(service.pods())} == engines


def test_a_drained_node_loses_no_request_and_no_last_engine(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    with client.streams(service, PROMPTS, max_tokens=160) as streams:
        streams.started(len(PROMPTS))
        node = service.pods()[0]["spec"]["nodeName"]
        with cordoned(kubectl, node):
            # Only this service's engines, and not for ever: on the last node their disruption
            # budget keeps one of them where it is.
            drain = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data"]
            drain += [f"--pod-selector={service.selector()}", "--timeout=90s"]
            kubectl.run(*drain, timeout=120)
            assert any(is_ready(pod) for pod in service.pods())
            answers = streams.answers()
    assert [a for a in answers if not a.is_whole] == []
    service.settle()


@contextmanager
def cordoned(kubectl: Kubectl, node: str) -> Iterator[None]:
    try:
        yield
    finally:
        kubectl("uncordon", node)
