"""Streams of routers that anybody may open: no message holds up others, nor takes much memory."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import status_pb2
from ullage_testing.loop_watch import watched_loop
from ullage_testing.peak_memory import PeakMemory

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, TicketsSection
from ullage_common.wire import multiplex
from ullage_common.wire.channels import CHANNEL_OPTIONS
from ullage_common.wire.errors import abort, from_rpc_error, from_status, invalid

MULTIPLEX = "/ullage.inference.v1.InferenceService/Multiplex"
MOST_BYTES = 96 << 20
"""Memory that a message of 16 MiB may take for a moment, with itself at both ends."""


def message(calls: Iterable[dict[str, Any]]) -> bytes:
    made = [pb.MultiplexCall(**call) for call in calls]
    return pb.MultiplexRequest(calls=made).SerializeToString()


def size(number: int) -> bytes:
    """A number as protobuf writes lengths."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


TEXT = pb.GenerateRequest(text="é" * 4_000_000)
LISTS = b"\x1a" + size(1 << 20) + b"\x01" * (1 << 20)
METADATA = {str(i): "" for i in range(40_000)}
BIASES = pb.SamplingParams(logit_bias=dict.fromkeys(range(40_000), 1.0))

MESSAGES: dict[str, tuple[list[bytes], str]] = {
    "calls": ([message({"tag": i} for i in range(20_000))], "BODY_TOO_LARGE"),
    "empty calls": ([b"\x0a\x00" * 8_000_000], "BODY_TOO_LARGE"),
    "empty calls of a short message": ([b"\x0a\x00" * 8_000], "BODY_TOO_LARGE"),
    "calls without tickets": ([message({"tag": i} for i in range(4_000))], "TICKET_REQUIRED"),
    "calls one by one": ([message([{"tag": i}]) for i in range(4_000)], "TICKET_REQUIRED"),
    "a call with a long text": ([message([{"tag": 1, "request": TEXT}])] * 2, ""),
    "a call with metadata": ([message([{"tag": 1, "metadata": METADATA}])], ""),
    "a call with biases": (
        [message([{"tag": 1, "request": pb.GenerateRequest(sampling=BIASES)}])],
        "",
    ),
    "grants": ([b"\x12\x00" * 120_000], ""),
    "many grants": ([b"\x12\x00" * 8_000_000], "BODY_TOO_LARGE"),
    "cancelled tags": ([LISTS], ""),
    "cancelled tags in pieces": ([LISTS * 15], "BODY_TOO_LARGE"),
    "unknown fields": ([b"\xf8\x07\x01" * 5_000_000], "BODY_TOO_LARGE"),
    "nonsense": ([b"\xff" * 50_000], "MALFORMED_MESSAGE"),
}


def outcome(channel: grpc.Channel, messages: list[bytes]) -> str:
    """Send messages on a stream; return the reason why it ended, empty if it ended well."""
    try:
        for _ in channel.stream_stream(MULTIPLEX)(iter(messages), timeout=60):
            pass
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    return ""


@pytest.fixture
def guarded(config: EngineConfig, tmp_path: Path) -> EngineConfig:
    """The configuration of an engine that clients without tickets reach."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    section = TicketsSection(keys_dir=str(tmp_path), required=True)
    return msgspec.structs.replace(config, tickets=section)


def test_no_message_holds_up_others(serve: Any, guarded: EngineConfig) -> None:
    failures = []

    async def scenario() -> None:
        async with serve(guarded) as engine:
            with grpc.insecure_channel(f"127.0.0.1:{engine.port}", CHANNEL_OPTIONS) as channel:
                for name, (messages, reason) in MESSAGES.items():
                    peak = PeakMemory()
                    async with watched_loop() as watch:
                        ended = await asyncio.to_thread(outcome, channel, messages)
                    try:
                        assert ended == reason
                        assert peak.grown_bytes < MOST_BYTES
                        watch.check()
                    except AssertionError as error:
                        failures.append((name, str(error)))
                assert (await engine.state()).ready

    asyncio.run(scenario())
    assert not failures


def test_many_streams_do_not_hold_up_others_either(serve: Any, guarded: EngineConfig) -> None:
    calls = message({"tag": i} for i in range(1_000))

    async def scenario() -> None:
        async with serve(guarded) as engine, watched_loop() as watch:
            with grpc.insecure_channel(f"127.0.0.1:{engine.port}", CHANNEL_OPTIONS) as channel:
                streams = (asyncio.to_thread(outcome, channel, [calls]) for _ in range(100))
                assert set(await asyncio.gather(*streams)) == {"TICKET_REQUIRED"}
            watch.check()

    asyncio.run(scenario())


def reasons(answer: pb.MultiplexResponse) -> list[str]:
    """Return why calls ended, those that were served left out."""
    statuses = [event.status for event in answer.events if event.HasField("status")]
    return [from_status(status_pb2.Status.FromString(status)).reason for status in statuses]


def test_open_calls_of_a_stream_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplex, "MAX_CALLS", 3)
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=pb.StopConditions(max_tokens=4)
    )
    calls = [pb.MultiplexCall(tag=tag, request=asked, window=64) for tag in range(5)]

    async def scenario() -> None:
        async with serve(step_s=0.001) as engine, asyncio.timeout(60):
            stream = engine.inference.Multiplex()
            await stream.write(pb.MultiplexRequest(calls=calls[:3]))
            await stream.write(pb.MultiplexRequest(calls=calls[3:]))
            refused: list[str] = []
            served: set[int] = set()
            while len(refused) + len(served) < len(calls):
                answer = await stream.read()
                refused += reasons(answer)
                served |= {e.tag for e in answer.events if e.response.HasField("finished")}
            assert (refused, served) == (["CALLS_FULL"] * 2, {0, 1, 2})
            # Their places are free again.
            await stream.write(pb.MultiplexRequest(calls=calls[3:]))
            while len(served) < len(calls):
                answer = await stream.read()
                assert not reasons(answer)
                served |= {e.tag for e in answer.events if e.response.HasField("finished")}
            stream.cancel()

    asyncio.run(scenario())


class UnreadStream:
    """A context of a stream with messages of calls, whose answers nobody takes for a while.

    num_read
        messages that were read
    """

    def __init__(self, num_messages: int, num_calls: int) -> None:
        calls = [pb.MultiplexCall(tag=tag) for tag in range(num_calls)]
        self._message = pb.MultiplexRequest(calls=calls)
        self._num_messages = num_messages
        self.takes_answers = asyncio.Event()
        self.num_read = 0

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def read(self) -> object:
        await asyncio.sleep(0)
        if self.num_read == self._num_messages:
            return grpc.aio.EOF
        self.num_read += 1
        return self._message

    async def write(self, answer: pb.MultiplexResponse) -> None:
        await self.takes_answers.wait()


def test_calls_wait_while_nobody_reads_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplex, "MAX_CALLS", 40)

    async def refuse(request: pb.GenerateRequest, context: Any) -> None:
        await abort(context, invalid("model", "model is ''; give its name"))

    async def scenario() -> None:
        stream: Any = UnreadStream(num_messages=200, num_calls=40)
        serving = asyncio.create_task(multiplex.serve_multiplex(refuse, stream))
        for _ in range(5_000):
            await asyncio.sleep(0)
        assert stream.num_read <= 5 + multiplex.MAX_BATCH // 40
        stream.takes_answers.set()
        await serving
        assert stream.num_read == 200

    asyncio.run(asyncio.wait_for(scenario(), 60))


class UnwritableStream(UnreadStream):
    """A context of a stream that stays open, and whose writes fail."""

    async def read(self) -> object:
        if self.num_read:
            await asyncio.Event().wait()
        return await super().read()

    async def write(self, answer: pb.MultiplexResponse) -> None:
        raise RuntimeError("unforeseen")


def test_a_stream_ends_whose_answers_cannot_be_sent() -> None:
    """Its calls would wait for answers for ever."""
    ended = []

    async def answer(request: pb.GenerateRequest, context: Any) -> None:
        try:
            await context.write(pb.GenerateResponse())
            await asyncio.Event().wait()
        finally:
            ended.append(request)

    async def scenario() -> None:
        stream: Any = UnwritableStream(num_messages=1, num_calls=3)
        with pytest.raises(RuntimeError, match="unforeseen"):
            await multiplex.serve_multiplex(answer, stream)
        assert len(ended) == 3

    asyncio.run(asyncio.wait_for(scenario(), 60))
