"""Clients of a service that is stopped are told so at once, and are served when it is back."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2

STOPPED = {"revision": "r1", "stopped": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file by which routers learn of rollouts."""

    def replace(**document: Any) -> Path:
        folder = tmp_path / "rollout"
        folder.mkdir(exist_ok=True)
        new = tmp_path / "rollout.new"
        new.write_text(json.dumps(document), encoding="utf-8")
        return new.replace(folder / "rollout.yaml")

    return replace


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0.01)


def is_stopped(service: Any) -> bool:
    return bool(service.router.service.rollout.canary.is_stopped)


async def test_requests_get_503_with_the_remedy_and_no_time_to_come_back(
    start_service: Any, write: Callable[..., Path]
) -> None:
    async with start_service(rollout_file=str(write(revision="r1"))) as service:
        assert (await service.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        write(**STOPPED)
        await until(lambda: is_stopped(service))
        answer = await service.http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "STOPPED")
        assert "set spec.stop of its LLMService to false" in error["message"]
        assert "retry-after" not in answer.headers
        metrics = (await service.monitoring.get("/metrics")).text
        assert 'ullage_router_refusals_total{reason="STOPPED"} 1.0' in metrics
        assert 'requests_total{code="503"}' not in metrics, "a stop misses no objective"

        write(revision="r1")
        await until(lambda: not is_stopped(service))
        assert (await service.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_grpc_clients_are_told_not_to_retry(
    start_service: Any, write: Callable[..., Path]
) -> None:
    async with start_service(rollout_file=str(write(**STOPPED))) as service:
        request = inference_pb2.GenerateRequest(model="tiny", text="Hi")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in service.grpc.Generate(request):
                pass
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "spec.stop" in refused.value.details()


async def test_a_router_that_starts_meanwhile_is_ready_to_say_it(
    start_service: Any, write: Callable[..., Path]
) -> None:
    """Without a ready router clients would be refused the connection."""
    file = str(write(**STOPPED))
    nobody = {"single": ["127.0.0.1:1"]}
    async with start_service(rollout_file=file, pools=nobody, wait=False) as service:
        assert (await service.http.get("/readyz")).status_code == 200
        answer = await service.http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503


async def test_what_is_held_for_a_sleeping_pool_waits_no_longer(
    start_service: Any, write: Callable[..., Path]
) -> None:
    settings = {"sleepy": ("single",), "wait": False}
    async with start_service(rollout_file=str(write(revision="r1")), **settings) as service:
        queue = service.router.service.scale_to_zero.queue
        asked = asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))
        with contextlib.ExitStack() as stack:
            stack.callback(asked.cancel)
            await until(lambda: len(queue) == 1)
            write(**STOPPED)
            answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "STOPPED")
        assert queue.wanted("single") == 0, "nothing asks to wake what people stopped"
