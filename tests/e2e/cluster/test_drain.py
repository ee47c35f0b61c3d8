"""Engines and routers end under streams: scale-down, a node's drain, a rollout. Nothing is lost."""

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ullage_cluster.client import Client
from ullage_cluster.kubectl import Kubectl, is_ready, names, until
from ullage_cluster.service import KIND, Service

PROMPTS = tuple(f"Tell a long story about {thing}." for thing in ("iron", "snow", "moss", "silk"))
LONGEST_S = 900


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
    with client.streams(
        service, PROMPTS[:2], max_tokens=24, seconds=LONGEST_S, stop=True
    ) as streams:
        streams.started(2)
        old = names(service.pods("router"))
        # Read by routers alone: no engine may restart.
        service.edit(routing={"queue": {"maxRequests": 31, "timeout": "30s"}})
        until(lambda: not set(old) & set(names(service.pods("router"))), "the routers are new")
        answers = streams.stop()
    assert [a for a in answers if not a.is_whole] == []
    service.settle()
    assert {kubectl.uid("pod", name) for name in names(service.pods())} == engines


def test_a_drained_node_loses_no_request_and_no_last_engine(
    kubectl: Kubectl,
    service: Service,
    client: Client,
    hold_nodes: Callable[[int], AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    before = {pod["metadata"]["uid"] for pod in service.pods()}
    with hold_nodes(fcntl.LOCK_EX), client.streams(service, PROMPTS, max_tokens=160) as streams:
        streams.started(len(PROMPTS))
        node = service.pods()[0]["spec"]["nodeName"]
        with drain(kubectl, node, service.selector(), tmp_path / "drain.log") as ends_or_is_refused:
            # On the last node the disruption budget keeps one engine where it is.
            until(ends_or_is_refused, "the drain has done what it may")
            answers = streams.answers()
            until(
                lambda: not before <= {pod["metadata"]["uid"] for pod in service.pods()},
                "an engine is gone",
            )
            assert any(is_ready(pod) for pod in service.pods())
    assert [a for a in answers if not a.is_whole] == []
    service.settle()


@contextmanager
def drain(kubectl: Kubectl, node: str, selector: str, log: Path) -> Iterator[Callable[[], bool]]:
    """Drains the node of these pods and no others; gives whether all are gone or one must stay."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={selector}")
    command = kubectl.command("drain", node, *options)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield lambda: process.poll() is not None or "disruption budget" in log.read_text()
        finally:
            process.kill()
            process.wait()
            kubectl("uncordon", node)
