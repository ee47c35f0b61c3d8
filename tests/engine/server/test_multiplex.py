"""Multiplex over a real socket: what Generate answers, refuses and cancels, on one stream."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import from_status

Serve = Callable[..., AbstractAsyncContextManager[Any]]


def call(tag: int, max_tokens: int = 20, window: int = 64, **fields: Any) -> pb.MultiplexCall:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(seed=5),
        stop=pb.StopConditions(max_tokens=max_tokens),
        **fields,
    )
    return pb.MultiplexCall(tag=tag, request=request, window=window)


class Stream:
    """One Multiplex stream and what came of each call."""

    def __init__(self, stub: Any) -> None:
        self._stream = stub.Multiplex()
        self.responses: dict[int, list[pb.GenerateResponse]] = {}
        self.statuses: dict[int, Any] = {}

    async def send(self, **fields: Any) -> None:
        await self._stream.write(pb.MultiplexRequest(**fields))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                for event in (await self._stream.read()).events:
                    if event.HasField("status"):
                        status = status_pb2.Status.FromString(event.status)
                        self.statuses[event.tag] = from_status(status)
                    else:
                        self.responses.setdefault(event.tag, []).append(event.response)

    def text(self, tag: int) -> str:
        return "".join(response.delta.text for response in self.responses[tag])

    def has_ended(self, tag: int) -> bool:
        told = self.responses.get(tag)
        return tag in self.statuses or bool(told and told[-1].HasField("finished"))

    def close(self) -> None:
        self._stream.cancel()


def test_calls_share_a_stream_and_nothing_else(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            alone = await engine.generate(call(0).request)
            stream = Stream(engine.inference)
            await stream.send(calls=[call(1), call(2), call(3, model="another")])
            await stream.until(lambda: all(map(stream.has_ended, (1, 2, 3))))
            assert stream.text(1) == stream.text(2) == alone.text
            assert stream.responses[1][-1].finished.usage == alone.finished.usage
            assert stream.statuses[3].code is grpc.StatusCode.NOT_FOUND
            assert stream.statuses[3].metadata["field"] == "model"
            stream.close()

    asyncio.run(scenario())


def test_a_cancelled_call_ends_in_the_worker(serve: Serve, run_dir: Path) -> None:
    async def scenario() -> None:
        trace = run_dir / "trace"
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            stream = Stream(engine.inference)
            await stream.send(calls=[call(1, max_tokens=400)])
            await stream.until(lambda: bool(stream.responses.get(1)))
            await stream.send(cancelled_tags=[1], calls=[call(2)])
            await stream.until(lambda: stream.has_ended(2))
            await engine.until(lambda state: state.requests_running == 0)
            assert "cancel" in trace.read_text()
            assert not stream.has_ended(1)
            stream.close()

    asyncio.run(scenario())
