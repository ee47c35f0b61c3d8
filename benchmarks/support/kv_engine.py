"""An engine process without a model, but with a limited KV pool, real gRPC and real admission.

usage: python -m benchmarks.support.kv_engine [--port 0] [--name engine-0] [--blocks 90]
                                              [--token-s 0.03] [--sequence-s 0]

A request holds the blocks of its prompt and its output from Accepted to Finished. The request gets
a token every `--token-s` seconds, plus `--sequence-s` for every other running request. A request
that does not fit is refused with RESOURCE_EXHAUSTED, as by real engines. The process prints one
JSON line with its port as soon as it listens, and on SIGTERM a JSON line with the numbers of
served, cancelled and refused requests.
"""

import argparse
import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.errors import ServiceError, abort
from ullage_common.wire.multiplex import serve_multiplex
from ullage_common.wire.request_fields import known_fields
from ullage_common.wire.servers import new_server

MODEL = "tiny"
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 1000
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
MAX_MODEL_LEN = 4096
HEARTBEAT_S = 1.0
PUSH_INTERVAL_S = 0.1
TOKENS_A_MESSAGE = 8
A = 64
"""Token id of the letter a in byte_tokenizer()."""

Context = grpc.aio.ServicerContext[Any, Any]


def blocks_of(prompt_tokens: int, output_tokens: int) -> int:
    """Return the number of blocks that a request holds."""
    return -(-(prompt_tokens + output_tokens) // BLOCK_TOKENS)


def byte_tokenizer() -> str:
    """Return a tokenizer with one token per byte, as JSON."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


@dataclass
class Pool:
    """A pool of KV blocks, with the remaining tokens of the requests that hold blocks."""

    blocks: int
    token_s: float
    sequence_s: float
    free: int = 0
    running: dict[int, list[int]] = field(default_factory=dict)
    """Remaining tokens and blocks of each request."""
    step_seconds: list[float] = field(default_factory=list)
    served: int = 0
    cancelled: int = 0
    refused: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.free = self.blocks

    @property
    def step_s(self) -> float:
        """Seconds per step, in which each running request gets one token."""
        return self.token_s + self.sequence_s * max(0, len(self.running) - 1)

    def take(self, key: int, blocks: int, tokens: int) -> bool:
        """Reserve blocks, and return whether enough blocks were free."""
        if blocks > self.free:
            self.refused += 1
            return False
        self.free -= blocks
        self.running[key] = [tokens, blocks]
        bucket = len(self.running).bit_length()
        self.step_seconds[bucket - 1 : bucket] = [self.step_s]
        self.notify()
        return True

    def give_back(self, key: int) -> None:
        self.free += self.running.pop(key)[1]
        self.notify()

    def notify(self) -> None:
        changed = self.changed
        self.changed = asyncio.Event()
        changed.set()


class KVEngine(
    inference_pb2_grpc.InferenceServiceServicer, headroom_pb2_grpc.HeadroomServiceServicer
):
    """The engine's two gRPC services, which share one pool."""

    def __init__(self, name: str, pool: Pool) -> None:
        self._name = name
        self.pool = pool
        self._keys = itertools.count()
        self._epoch = time.time_ns()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model=MODEL,
            request_fields=sorted(known_fields()),
            tokenizer_json=byte_tokenizer().encode(),
            chat_template="{% for m in messages %}{{ m.content }}\n{% endfor %}",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=256,
            profile=pb.MemoryProfile(
                block_tokens=BLOCK_TOKENS,
                groups=[pb.CacheGroup(bytes_per_token=BYTES_PER_TOKEN)],
                kv_pool_bytes=self.pool.blocks * BLOCK_BYTES,
            ),
        )

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Context
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        interval_s = request.min_interval_ms / 1000 or PUSH_INTERVAL_S
        for sequence in itertools.count(1):
            changed = self.pool.changed
            yield headroom_pb2.WatchHeadroomResponse(headroom=self._headroom(sequence))
            await asyncio.sleep(interval_s)
            try:
                async with asyncio.timeout(HEARTBEAT_S - interval_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _headroom(self, sequence: int) -> headroom_pb2.Headroom:
        pool = self.pool
        free = pool.free * BLOCK_BYTES
        releases = [
            headroom_pb2.Release(after_ms=int(1e3 * remaining * pool.step_s), bytes=n * BLOCK_BYTES)
            for remaining, n in sorted(pool.running.values())[:32]
        ]

        return headroom_pb2.Headroom(
            engine=self._name,
            epoch=self._epoch,
            sequence=sequence,
            model=MODEL,
            pool="single",
            ready=True,
            health=1.0,
            kv_pool_bytes=pool.blocks * BLOCK_BYTES,
            kv_free_bytes=free,
            headroom_bytes=free,
            requests_running=len(pool.running),
            expected_output_tokens=MAX_MODEL_LEN,
            releases=releases,
            decode_tokens_per_second=1 / pool.step_s,
            step_seconds=pool.step_seconds,
        )

    async def Multiplex(self, requests: object, context: Any) -> None:
        await serve_multiplex(self.Generate, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        tokens = request.stop.max_tokens
        key = next(self._keys)
        blocks = blocks_of(len(request.token_ids.ids), tokens)
        if not self.pool.take(key, blocks, tokens):
            full = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "no blocks left")
            await abort(context, full)

        try:
            received = sum(len(answer.token_ids) for answer in request.continuation.answers)
            accepted = pb.Accepted(
                request_id=request.request_id, engine=self._name, continued_tokens=received
            )
            yield pb.GenerateResponse(accepted=accepted)
            async for delta in self._deltas(key, tokens - received):
                yield pb.GenerateResponse(delta=delta)
        except (asyncio.CancelledError, GeneratorExit):
            self.pool.cancelled += 1
            raise
        finally:
            self.pool.give_back(key)

        self.pool.served += 1
        usage = pb.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=tokens)
        finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage)
        yield pb.GenerateResponse(finished=finished)

    async def _deltas(self, key: int, tokens: int) -> AsyncIterator[pb.Delta]:
        for start in range(0, tokens, TOKENS_A_MESSAGE):
            count = min(TOKENS_A_MESSAGE, tokens - start)
            await asyncio.sleep(count * self.pool.step_s)
            self.pool.running[key][0] -= count
            yield pb.Delta(text="a" * count, num_tokens=count, token_ids=[A] * count)


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    pool = Pool(options.blocks, options.token_s, options.sequence_s)
    engine = KVEngine(options.name, pool)
    server = new_server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)
    headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(engine, server)

    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    print(json.dumps({"port": port}), flush=True)

    await stop.wait()
    await server.stop(None)
    totals = {"served": pool.served, "cancelled": pool.cancelled, "refused": pool.refused}
    print(json.dumps({**totals, "free": pool.free, "blocks": pool.blocks}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name", default="engine-0")
    parser.add_argument("--blocks", type=int, default=90)
    parser.add_argument("--token-s", type=float, default=0.03)
    parser.add_argument("--sequence-s", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
