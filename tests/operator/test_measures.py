"""What routers tell of pools whose engines the operator does not hear."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from ullage_operator.measures import Measures

_ZERO = dict.fromkeys(
    (
        "ready",
        "capacity_bytes",
        "headroom_bytes",
        "engine_requests",
        "credit_bytes",
        "queued",
        "queue_bytes",
        "queue_s",
        "answered",
        "late",
        "held",
        "wanted",
        "idle_s",
    ),
    0,
)


def report(**ready: int) -> str:
    return json.dumps([{pool: _ZERO | {"ready": number} for pool, number in ready.items()}])


def router(port: int, ready: bool = True) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": port}]
    return {
        "metadata": {"name": "r", "labels": {"app.kubernetes.io/component": "router"}},
        "spec": {"containers": [{"ports": ports}]},
        "status": {
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


async def asked(bodies: list[str], ready: bool) -> frozenset[str]:
    """Which of the pools single and large are cut off, as routers with these pages tell."""
    runners, pods, measures = [], [], Measures()
    for body in bodies:

        async def answer(_: web.Request, body: str = body) -> web.Response:
            return web.Response(text=body, status=200 if body else 503)

        app = web.Application()
        app.router.add_get("/measures", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        pods.append(router(runners[-1].addresses[0][1], ready))
    try:
        return await measures.cut_off(pods, {"single", "large"})
    finally:
        await measures.close()
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("bodies", "ready", "expected"),
    [
        ([report(single=1, large=0), report(single=0, large=0)], True, {"large"}),
        ([report(single=1, large=0), report(single=1, large=1)], True, set()),
        ([report(single=1, large=0), ""], True, set()),
        ([report(single=1, large=0), "no measures"], True, set()),
        ([report(single=0, large=0)], False, set()),
        ([], True, set()),
    ],
    ids=["none", "one reaches it", "one is mute", "one is strange", "none is ready", "no router"],
)
def test_a_pool_is_cut_off_when_all_ready_routers_say_so(
    bodies: list[str], ready: bool, expected: set[str]
) -> None:
    assert asyncio.run(asked(bodies, ready)) == expected
