"""An engine without a model that answers at once, for measurements of routers.

usage: python -m benchmarks.router.engine PORT... [--tokens 16] [--interval-ms 0] [--http]

Each port is a separate engine, and port 0 means any free port. As soon as all engines listen, the
process prints the ports as a JSON list.

The engine serves the RPCs that a router calls (GetModel, WatchHeadroom, Generate, Multiplex), with
the tokenizer and chat template of SmolLM2. It coalesces tokens as each call requests, like a real
engine. With --http, the engine serves OpenAI's chat endpoint, for routers that are proxies. It then
sends one event per token, and all events in one piece unless there is an interval. Answers are
built in advance, so that the router dominates every figure.
"""

import argparse
import asyncio
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import uvloop

from benchmarks.support.options import SMOLLM2
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.flow_control import merge_deltas
from ullage_common.wire.multiplex import serve_multiplex
from ullage_common.wire.request_fields import known_fields
from ullage_common.wire.servers import new_server
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.tokenizer.tokenizer import load_tokenizer

MODEL = "fake"
POOL_BYTES = 64 << 30
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 23_040
CONTEXT = 8192


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class InstantEngine(
    inference_pb2_grpc.InferenceServiceServicer, headroom_pb2_grpc.HeadroomServiceServicer
):
    """An engine that is never full and answers at the given interval."""

    def __init__(self, name: str, tokens: int, interval_s: float) -> None:
        self._name = name
        self._interval_s = interval_s
        deltas = [pb.Delta(text="word ", num_tokens=1, token_ids=[1000]) for _ in range(tokens)]
        usage = pb.Usage(prompt_tokens=5, completion_tokens=tokens)
        finished = pb.Finished(reason=pb.FINISH_REASON_STOP, usage=usage)
        self._responses = [
            pb.GenerateResponse(accepted=pb.Accepted(engine=name, max_tokens=tokens)),
            *(pb.GenerateResponse(delta=delta) for delta in deltas),
            pb.GenerateResponse(finished=finished),
        ]
        self._joined: dict[int, list[pb.MultiplexEvent]] = {}
        """Prepared events of an answer, by the number of coalesced tokens."""
        self._model = _model()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return self._model

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateResponse]:
        accepted, first, *others, finished = self._responses
        yield accepted
        yield first
        for response in others:
            await asyncio.sleep(until_step(self._interval_s, self._name))
            yield response
        yield finished

    async def Multiplex(self, requests: object, context: Any) -> None:
        if self._interval_s:
            await serve_multiplex(self.Generate, context)
            return
        await context.send_initial_metadata(())
        while isinstance(request := await context.read(), pb.MultiplexRequest):
            answer = pb.MultiplexResponse()
            for call in request.calls:
                events = self._events(max(1, call.coalesce_tokens))
                for event in events:
                    event.tag = call.tag
                answer.events.extend(events)
            if answer.events:
                await context.write(answer)

    def _events(self, together: int) -> list[pb.MultiplexEvent]:
        """Return an answer's events: Accepted, first token, other tokens coalesced, Finished."""
        events = self._joined.get(together)
        if events is None:
            accepted, first, *others, finished = self._responses
            groups = [
                merge_deltas(others[i : i + together]) for i in range(0, len(others), together)
            ]
            events = self._joined[together] = [
                pb.MultiplexEvent(response=response)
                for response in (accepted, first, *groups, finished)
            ]
        return events

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Any
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        headroom = headroom_pb2.Headroom(
            engine=self._name,
            epoch=1,
            model=MODEL,
            pool="single",
            ready=True,
            health=1.0,
            threshold=0.85,
            kv_pool_bytes=POOL_BYTES,
            kv_free_bytes=POOL_BYTES,
            headroom_bytes=POOL_BYTES,
            expected_output_tokens=16,
        )
        while True:
            headroom.sequence += 1
            yield headroom_pb2.WatchHeadroomResponse(headroom=headroom)
            await asyncio.sleep(0.2)


@functools.cache
def _model() -> pb.GetModelResponse:
    tokenizer = load_tokenizer(resolve_source(SMOLLM2).path)
    group = pb.CacheGroup(bytes_per_token=BYTES_PER_TOKEN)
    return pb.GetModelResponse(
        model=MODEL,
        request_fields=sorted(known_fields()),
        tokenizer_json=tokenizer.json_bytes,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tokenizer.eos_token_ids,
        max_model_len=CONTEXT,
        vocab_size=49152,
        profile=pb.MemoryProfile(
            block_tokens=BLOCK_TOKENS, groups=[group], kv_pool_bytes=POOL_BYTES
        ),
    )


class OpenAIEngine(asyncio.Protocol):
    """The connection of a client that sends one request at a time."""

    def __init__(self, tokens: int, interval_s: float) -> None:
        self._interval_s = interval_s
        base = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
        message = {"role": "assistant", "content": "word " * tokens}
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = base | {"object": "chat.completion", "choices": [choice], "usage": usage}
        delta = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
        chunk = base | {"object": "chat.completion.chunk", "choices": [delta]}
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}
        self._whole, self._models = _http(json.dumps(answer)), _http(json.dumps(models))
        done = _chunk(b"data: [DONE]\n\n")
        self._events = [STREAM_HEAD + _chunk(event), *[_chunk(event)] * (tokens - 1)]
        self._events[-1] += done + b"0\r\n\r\n"
        self._stream = b"".join(self._events)
        self._read = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, separator, rest = self._read.partition(b"\r\n\r\n")
        if not separator:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if len(rest) < int(length.split(b"\r\n")[0] or 0):
            return

        self._read = b""
        if head.startswith(b"POST"):
            is_streamed = b'"stream":true' in rest.replace(b" ", b"")
            whole = self._stream if is_streamed else self._whole
            if not self._interval_s:
                self._transport.write(whole)
            elif is_streamed:
                self._send(0)
            else:
                duration_s = self._interval_s * (len(self._events) - 1)
                asyncio.get_running_loop().call_later(duration_s, self._transport.write, whole)
        else:
            self._transport.write(self._models)

    def _send(self, number: int) -> None:
        """Send an answer's events one after another, at the engine's interval."""
        self._transport.write(self._events[number])
        if number + 1 < len(self._events):
            loop = asyncio.get_running_loop()
            local = self._transport.get_extra_info("sockname")
            loop.call_later(until_step(self._interval_s, local), self._send, number + 1)


def until_step(interval_s: float, engine: object) -> float:
    """Return the seconds until the next step, in which every request gets a token."""
    if not interval_s:
        return 0.0
    shift_s = interval_s * (hash(engine) % 16) / 16
    passed_s = (asyncio.get_running_loop().time() + shift_s) % interval_s
    # Timers are inexact: one that fires just before a step counts as that step.
    return interval_s - passed_s if passed_s < interval_s / 2 else 2 * interval_s - passed_s


def _http(body: str) -> bytes:
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve_http(ports: Sequence[int], tokens: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    listening = []
    for port in ports:
        server = await loop.create_server(
            lambda: OpenAIEngine(tokens, interval_s), "127.0.0.1", port, backlog=2048
        )
        listening.append(server.sockets[0].getsockname()[1])
    print(json.dumps(listening), flush=True)
    await asyncio.Event().wait()


async def serve(ports: Sequence[int], tokens: int, interval_s: float) -> None:
    servers = [new_server() for _ in ports]  # a server without a reference ends
    listening = []
    for port, server in zip(ports, servers, strict=True):
        listening.append(server.add_insecure_port(f"127.0.0.1:{port}"))
        engine = InstantEngine(f"{MODEL}-{listening[-1]}", tokens, interval_s)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)
        headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(engine, server)
        await server.start()
    print(json.dumps(listening), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="between two tokens")
    parser.add_argument("--http", action="store_true")
    options = parser.parse_args()
    if options.http:
        uvloop.run(serve_http(options.ports, options.tokens, options.interval_ms / 1000))
    else:
        uvloop.run(serve(options.ports, options.tokens, options.interval_ms / 1000))


if __name__ == "__main__":
    main()
