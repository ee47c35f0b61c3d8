"""Clients that read slowly, not at all, or are gone: others do not notice and nothing stays."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

import grpc
import msgspec
import pytest
from ullage_testing import jumping_clock

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.config.engine import EngineConfig
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.server import service

Serve = Callable[..., AbstractAsyncContextManager[Any]]


def ask(max_tokens: int, logprobs: bool = False) -> pb.GenerateRequest:
    """With log-probabilities deltas are so large that an unread stream is soon full."""
    output = pb.OutputOptions(return_token_ids=True)
    if logprobs:
        output.top_logprobs = 20
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(seed=9),
        stop=pb.StopConditions(max_tokens=max_tokens),
        output=output,
    )


@contextlib.asynccontextmanager
async def unread(engine: Any, count: int) -> AsyncIterator[list[Any]]:
    """Streams of which only the first message was read, by a client with small buffers."""
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{engine._app.port}", options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(ask(400, logprobs=True)) for _ in range(count)]
        for call in calls:
            await call.read()
        yield calls
        for call in calls:
            call.cancel()


def test_streams_that_nobody_reads_do_not_hold_up_the_others(
    serve: Serve, fake: ModuleType
) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine, unread(engine, 8):
            async with asyncio.timeout(60):
                answer = await engine.generate(ask(200))
            assert answer.token_ids == [fake.token_at(place, 9) for place in range(3, 203)]
            assert len(answer.deltas) > 1  # how many depends on how fast the client reads
            # They were computed to their end, which frees their memory, though nobody reads them.
            await engine.until(lambda state: state.requests_running == 0)

    asyncio.run(scenario())


class SlowReader:
    """A call whose client takes its first tokens when the time is over and more are there."""

    def __init__(self, engine: Any, limit_s: float) -> None:
        self.messages: list[pb.GenerateResponse] = []
        self._journal = engine._app._journal
        self._limit_s = limit_s

    async def write(self, message: pb.GenerateResponse) -> None:
        self.messages.append(message)
        if message.HasField("delta") and self._limit_s:
            (entry,) = self._journal.unfinished()
            while not entry._update.token_ids:  # noqa: ASYNC110 - the worker's, without an event
                await asyncio.sleep(0.01)
            limit_s = self._limit_s
            self._limit_s = 0.0
            await jumping_clock.clock().jump(limit_s)

    def time_remaining(self) -> None:
        """It set no deadline of its own."""

    def invocation_metadata(self) -> None:
        """It came with none."""


def test_a_client_slower_than_the_engine_gets_what_there_was_in_its_time(
    serve: Serve, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SLOW_CLIENT_GRACE_S", 60.0)
    limits = msgspec.structs.replace(config.limits, request_timeout=600.0, total_timeout=600.0)

    async def scenario() -> None:
        slow_config = msgspec.structs.replace(config, limits=limits)
        async with serve(slow_config, step_s=0.25) as engine:
            reader = SlowReader(engine, 600.0)
            await engine._app._inference.Generate(ask(400), reader)
        *_, last = reader.messages
        assert last.finished.reason == pb.FINISH_REASON_TIMEOUT
        told = sum(message.delta.num_tokens for message in reader.messages)
        assert 0 < told == last.finished.usage.completion_tokens < 400

    jumping_clock.run(scenario())


def test_an_answer_that_is_never_read_is_forgotten_after_its_time(
    serve: Serve, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SLOW_CLIENT_GRACE_S", 0.3)
    limits = msgspec.structs.replace(config.limits, request_timeout=1.0, total_timeout=1.0)

    async def scenario() -> None:
        slow_config = msgspec.structs.replace(config, limits=limits)
        async with serve(slow_config, step_s=0.0) as engine, unread(engine, 3) as calls:
            drained = await engine.admin.Drain(admin_pb2.DrainRequest(timeout_ms=5000))
            assert drained.unfinished == 0
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await calls[0].read() is not grpc.aio.EOF:
                    pass
            assert from_rpc_error(raised.value).reason == "SLOW_CLIENT"

    asyncio.run(scenario())


def test_a_client_that_vanishes_frees_what_it_held(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            before = (await engine.state()).headroom_bytes
            channel = open_channel(f"127.0.0.1:{engine._app.port}")
            generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
            await generate(ask(400)).read()
            await engine.until(lambda state: state.requests_running == 1)
            await channel.close()
            await engine.until(lambda state: state.requests_running == 0)
            assert (await engine.state()).headroom_bytes == before

    asyncio.run(scenario())


class Updates:
    """A request's news, as far as they came."""

    def __init__(self, is_streamed: bool = True) -> None:
        self.is_streamed = is_streamed
        self.queue: asyncio.Queue[list[str]] = asyncio.Queue()

    async def next_updates(self, until: float = math.inf) -> list[str] | None:
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                return await self.queue.get()
        except TimeoutError:
            return None


def test_only_silence_and_the_whole_time_end_an_answer(config: EngineConfig) -> None:
    """30 s may pass without a token and 600 s in all."""
    limits = msgspec.structs.replace(config.limits, request_timeout=30.0, total_timeout=600.0)
    parts: Any = [None] * 5
    ends: list[float] = []

    async def scenario() -> None:
        inference = service.InferenceService(msgspec.structs.replace(config, limits=limits), *parts)
        group: Any = Updates()
        loop = jumping_clock.clock()
        deadline = jumping_clock.clock().time() + 600.0

        def end(_: object, reason: str) -> None:
            ends.append(round(loop.jumped_s))
            group.queue.put_nowait([reason])

        inference._end = end  # type: ignore[method-assign]

        async def after(seconds: float) -> list[str]:
            waiting = asyncio.create_task(inference._next_updates(group, deadline))
            await loop.jump(seconds)
            group.queue.put_nowait(["token"])
            return list(map(str, await waiting))

        for _ in range(10):
            assert await after(29.0) == ["token"]
        assert ends == []
        assert await after(31.0) == ["timeout"]
        assert ends == [290 + 31]
        assert group.queue.get_nowait() == ["token"]
        while loop.jumped_s < 560:
            assert await after(25.0) == ["token"]
        await loop.jump(40.0)
        group.queue.put_nowait(["token"])
        assert await inference._next_updates(group, deadline) == ["token"]
        assert await inference._next_updates(group, deadline) == ["timeout"]

    jumping_clock.run(scenario())


def test_an_answer_that_is_known_only_at_its_end_has_the_whole_time(config: EngineConfig) -> None:
    limits = msgspec.structs.replace(config.limits, request_timeout=30.0, total_timeout=600.0)
    parts: Any = [None] * 5

    async def scenario() -> None:
        inference = service.InferenceService(msgspec.structs.replace(config, limits=limits), *parts)
        group: Any = Updates(is_streamed=False)
        loop = jumping_clock.clock()
        deadline = jumping_clock.clock().time() + 600.0
        inference._end = lambda _, reason: group.queue.put_nowait([reason])  # type: ignore[method-assign]
        waiting = asyncio.create_task(inference._next_updates(group, deadline))
        await loop.jump(500.0)
        assert not waiting.done()
        await loop.jump(101.0)
        assert list(map(str, await waiting)) == ["timeout"]

    jumping_clock.run(scenario())


def test_an_engine_reports_the_shortest_step_that_its_requests_bear(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            calls = []
            for limit_s in (0.5, 0.25, 0.0):
                asked = ask(400)
                asked.step_limit_s = limit_s
                call = engine.inference.Generate(asked)
                await call.read()
                calls.append(call)
            assert (await engine.state()).step_limit_s == 0.25
            calls[1].cancel()
            await engine.until(lambda state: state.step_limit_s == 0.5)
            calls[0].cancel()
            await engine.until(lambda state: state.step_limit_s == 0.0)
            calls[2].cancel()

    asyncio.run(scenario())
