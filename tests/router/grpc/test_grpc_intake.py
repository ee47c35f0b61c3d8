"""What gRPC clients may send before and after their key is known."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ullage_testing.http2_frames import (
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    Frame,
    call_fields,
    number,
)
from ullage_testing.loop_watch import watched_loop
from ullage_testing.peak_memory import PeakMemory

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import from_rpc_error

if TYPE_CHECKING:
    StartService = Any

MOST_BYTES = 64 << 20
GENERATE = "/ullage.inference.v1.InferenceService/Generate"
FLOOD = """
import asyncio, sys, grpc

async def send(channel, body):
    try:
        async for _ in channel.unary_stream(sys.argv[2])(body, timeout=60):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        body = bytes(12 << 20)
        print(set(await asyncio.gather(*(send(channel, body) for _ in range(16)))))

asyncio.run(main())
"""


def test_bodies_without_a_key_are_not_received(
    start_service: "StartService", tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text("sk-alice-0123456789")
    tenants = {"keys_dir": str(tmp_path / "keys"), "tenants": [{"name": "alice"}]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            address = f"127.0.0.1:{service.router.grpc_port}"
            peak = PeakMemory()
            flood = await asyncio.create_subprocess_exec(
                sys.executable, "-c", FLOOD, address, GENERATE, stdout=asyncio.subprocess.PIPE
            )
            codes, _ = await flood.communicate()
            assert codes.decode().strip() == "{'UNAUTHENTICATED'}"
            assert peak.grown_bytes < MOST_BYTES
            stats = await service.stats()
            assert [line["error"] for line in stats["latest"]] == ["INVALID_API_KEY"] * 16

    asyncio.run(scenario())


def wrapped(field: str, payload: bytes) -> bytes:
    """A field of a request that is a message."""
    number = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[field].number
    size = bytearray()
    rest = len(payload)
    while rest > 127:
        size.append(rest & 127 | 128)
        rest >>= 7
    return bytes([number << 3 | 2, *size, rest]) + payload


def called(arguments: str, count: int) -> bytes:
    calls = [inference_pb2.ToolCall(id="c", name="f", arguments=arguments)] * count
    turns = [
        inference_pb2.Message(role="assistant", tool_calls=calls),
        inference_pb2.Message(role="user", content="x"),
    ]
    messages = inference_pb2.Messages(messages=turns)
    return inference_pb2.GenerateRequest(messages=messages).SerializeToString()


def test_no_message_holds_up_others(start_service: "StartService") -> None:
    bodies = {
        "messages": wrapped("messages", b"\x0a\x00" * 4_000_000),
        "token ids": wrapped("token_ids", wrapped("request_id", bytes(8_000_000))),
        "legal token ids": wrapped("token_ids", wrapped("request_id", b"\x01" * 1_000_000)),
        "unknown": b"\xf8\x07\x01" * 2_500_000,
        "small arguments": called(json.dumps({"a": [[]] * 10_000}), 128),
        "long arguments": called(json.dumps({"a": [[]] * 1_000_000}), 1),
        "text": inference_pb2.GenerateRequest(text="é" * 4_000_000).SerializeToString(),
    }
    failures = []

    async def scenario() -> None:
        async with start_service(max_model_len=120_000) as service:
            address = f"127.0.0.1:{service.router.grpc_port}"
            for name, body in bodies.items():
                async with watched_loop() as watch:
                    code = await asyncio.to_thread(send, address, body)
                try:
                    assert code is grpc.StatusCode.INVALID_ARGUMENT
                    watch.check()
                except AssertionError as error:
                    failures.append((name, str(error)))

    asyncio.run(scenario())
    assert not failures


def send(address: str, body: bytes) -> grpc.StatusCode | None:
    with grpc.insecure_channel(address) as channel:
        try:
            list(channel.unary_stream(GENERATE)(body, timeout=60))
        except grpc.RpcError as error:
            return from_rpc_error(error).code
    return None


def test_no_name_of_a_method_ends_the_server(start_service: "StartService") -> None:
    """gRPC decodes the name of a method that nobody has registered, outside of all handlers."""

    async def scenario() -> None:
        async with start_service() as service:
            address = ("127.0.0.1", service.router.grpc_port)
            for name in (
                b"/\xe2\x80/Generate",
                b"/ullage.inference.v1.InferenceService/\xff",
                b"\xff",
            ):
                block = call_fields("/").replace(field(":path", b"/"), field(":path", name))
                frames = (Frame(SETTINGS, 0, 0, b""), Frame(HEADERS, END_HEADERS | 1, 1, block))
                reader, writer = await asyncio.open_connection(*address)
                writer.write(PREFACE + b"".join(frame.encoded() for frame in frames))
                assert await reader.read(9)
                answer = b""
                while b"grpc-status" not in answer:
                    answer += await reader.read(1 << 16)
                writer.close()
            request = inference_pb2.GenerateRequest(text="Hi")
            unknown = service.channel.unary_unary("/ullage.inference.v1.InferenceService/Unknown")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            answers = [each async for each in service.grpc.Generate(request)]
            assert answers[-1].HasField("finished")

    asyncio.run(scenario())


def field(name: str, value: bytes) -> bytes:
    return b"\0" + number(len(name), 7) + name.encode() + number(len(value), 7) + value
