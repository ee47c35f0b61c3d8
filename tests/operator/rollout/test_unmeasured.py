"""A canary whose pods do not answer the operator: the status says the cause and the remedy.

A sidecar that wants mTLS ends plaintext connections, as the servers here do.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.controller.headroom_streams import HeadroomStreams, StreamTimes
from ullage_operator.controller.router_client import RouterClient
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.policy.engine_health import EngineTarget
from ullage_operator.rollout.facts import unheard

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = ServiceKey("models", "demo")


@asynccontextmanager
async def strict_sidecar() -> AsyncIterator[int]:
    """The port of a server that resets every connection once something was said in plaintext."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, at_once)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def router_pod(port: int) -> dict[str, Any]:
    container = {"name": "router", "ports": [{"name": "metrics", "containerPort": port}]}
    labels = {"app.kubernetes.io/component": "router"}
    return {
        "metadata": {"name": "demo-router-0", "labels": labels},
        "spec": {"containers": [container]},
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }


async def unanswered() -> tuple[int, tuple[str, ...]]:
    async with strict_sidecar() as port:
        client = RouterClient()
        try:
            answers = await client.canary_samples(KEY, [router_pod(port)])
        finally:
            await client.close()
    assert answers.samples == ()
    return port, answers.unanswered


def test_a_canary_that_no_router_tells_of_says_why_from_its_first_step(manifest: Any) -> None:
    port, told = asyncio.run(unanswered())
    [reason] = told
    assert reason.startswith(f"127.0.0.1:{port}: ")

    objects: dict[Any, Any] = {}
    status: dict[str, Any] = {}
    stages = []
    for minute in range(60):
        spec = {"image": "one" if minute < 2 else "two"}
        observed = Observed(
            now=NOW + timedelta(minutes=minute), objects=objects, status=status, unanswered=told
        )
        planned = plan(parse(manifest(**spec)), observed, Settings())
        for item in planned.delete:
            del objects[key_of(item)]
        objects |= {key_of(item): running(item) for item in planned.apply}
        status = planned.status
        stages.append(status["rollout"]["stage"])
        if stages[-2:] == ["Canary", "Canary"] or stages[-1] == "RolledBack":
            message = status["rollout"]["message"]
            assert "no router has reported what it counted" in message
            assert reason in message
            assert "let it reach port 9090" in message
            assert "the chart's value mesh" in message
    assert {"Canary", "RolledBack"} <= set(stages)


def running(item: dict[str, Any]) -> dict[str, Any]:
    if item["kind"] not in ("StatefulSet", "Deployment"):
        return item
    count = item["spec"]["replicas"]
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), count)
    meta = item["metadata"] | {"generation": 1}
    return item | {"metadata": meta, "status": counts | {"observedGeneration": 1}}


def test_an_engine_that_ends_the_operators_stream_is_named_with_the_remedy() -> None:
    async def scenario() -> None:
        streams = HeadroomStreams[ServiceKey](lambda _: None, StreamTimes(tick_s=0.1))
        async with strict_sidecar() as port:
            target = EngineTarget("single", f"127.0.0.1:{port}", 0.5)
            streams.follow(KEY, {"uid": target})
            async with asyncio.timeout(60):
                while not streams.engine_health(KEY)["uid"].trouble:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            trouble = streams.engine_health(KEY)["uid"].trouble
            assert trouble.startswith(f"127.0.0.1:{port}: ")
            message = unheard([trouble])
            assert trouble in message
            assert "port 8081" in message
            assert "docs/guide/mesh.md" in message
            await streams.close()

    asyncio.run(scenario())
