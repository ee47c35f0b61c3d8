"""A request that is cancelled at any of its awaits gives back all that it has taken."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ullage_router.http.app import App
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import ASGIApp, Message, asgi

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEY = "sk-alice-0123456789"
FREE_BYTES = 800 * 16_000
BODY = {"model": "tiny", "prompt": "Hi", "temperature": 1.0}
BODIES: dict[str, dict[str, Any]] = {
    "whole": BODY,
    "streamed": BODY | {"stream": True},
    "shared": BODY | {"temperature": 0.0, "stream": True},
    "several prompts": BODY | {"prompt": ["a", "b", "c"]},
    "long": BODY | {"prompt": "x" * 6000, "user": "y" * 20_000},
}
MAX_STEPS = 100


class Steps(Coroutine[Any, Any, None]):
    """A coroutine that is cancelled before one of its steps, or during it.

    Before a step, the result that the step was to take has already been given.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], last: int, *, is_before: bool) -> None:
        self.is_cancelled = False
        self._coroutine = coroutine
        self._last = last
        self._is_before = is_before
        self._num_steps = 0

    def send(self, value: Any) -> Any:
        self._num_steps += 1
        if self._num_steps == self._last:
            self.is_cancelled = True
            if self._is_before:
                return self._coroutine.throw(asyncio.CancelledError())
            task = asyncio.current_task()
            assert task
            task.cancel()
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        raise AssertionError("a task runs it")


async def ask(app: ASGIApp, body: dict[str, Any], last: int, *, is_before: bool) -> int | None:
    """Ask once, and return the status of the response, or None if the request was cancelled."""
    data = json.dumps(body).encode()
    headers = {
        "authorization": f"Bearer {KEY}",
        "content-type": "application/json",
        "content-length": f"{len(data)}",
    }
    scope = {
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    messages: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        messages.append(message)

    answering: Any = app(scope, receive, send)
    steps = Steps(answering, last, is_before=is_before)
    async with asyncio.timeout(20):
        await asyncio.wait([asyncio.create_task(steps)])
    return None if steps.is_cancelled else messages[0]["status"]


def held(service: "Service") -> dict[str, Any]:
    """Return what the router holds for requests, without what is zero."""
    stats = service.router.service.snapshot()
    queue = stats["queue"]
    amounts = {
        "requests": stats["inflight"],
        "prefill window": stats["prefill"]["waiting"],
        "engines": sum(e["inflight"] + e["credit_bytes"] for e in stats["engines"]),
        "queue": queue["waiting"] + queue["bytes"] + queue["prompt_bytes"],
        "tenants": sum(each["active"] for each in stats["tenants"]["usage"]),
        "calls of engines": sum(engine.active for engine in service.engines),
        "generations": sum(t.get_name() == "generation" for t in asyncio.all_tasks()),
    }
    return {name: amount for name, amount in amounts.items() if amount}


async def fill(service: "Service") -> asyncio.TimerHandle:
    """Leave no memory free on any engine for a moment, and return the timer that ends it."""

    def free() -> None:
        for engine in service.engines:
            engine.push(headroom_bytes=FREE_BYTES)

    for engine in service.engines:
        engine.push(headroom_bytes=0)
    known = service.router.service.engines.all()
    await service.until(lambda: not any(each.headroom.headroom_bytes for each in known))
    return asyncio.get_running_loop().call_later(0.03, free)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "during"])
@pytest.mark.parametrize("kind", [*BODIES, "queued"])
def test_nothing_is_kept(
    start_service: "StartService", tmp_path: Path, kind: str, is_before: bool
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(KEY)
    alice = {"name": "alice", "concurrency": 50, "tokens_per_minute": 10**9}
    tenants = {"keys_dir": str(keys), "tenants": [alice]}

    async def scenario() -> None:
        settings = {"single": (800, 800), "max_model_len": 20_000, "tenants": tenants}
        async with start_service(**settings) as service:
            app = asgi(App(service.router.service), HTTPLimits())
            for last in range(1, MAX_STEPS):
                timer = await fill(service) if kind == "queued" else None
                status = await ask(app, BODIES.get(kind, BODY), last, is_before=is_before)
                if timer:
                    timer.cancel()
                try:
                    await service.until(lambda: not held(service), 10.0)
                except TimeoutError:
                    pytest.fail(f"cancelled at step {last}, it keeps {held(service)}")
                if status is not None:
                    assert status == 200
                    return
            raise AssertionError("the request has more steps than are tried")

    asyncio.run(scenario())
