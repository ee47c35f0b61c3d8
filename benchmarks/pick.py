"""Compare Pick and tickets with requests through the router, in operations per second.

Requests are placed in two ways: as distinct requests, each with a different size and a separate
ticket, and as equal requests, which share one entry with a count. Fake engines in a separate
process answer at once with one token. A real router runs in another process, and the clients run in
this process. Each row is printed on one line.

examples:
  python -m benchmarks pick --seconds 3 --engines 4
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop
from tokenizers import Tokenizer, models

from benchmarks.support.options import new_parser
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.tickets.client import Client
from ullage_common.wire.channels import open_channel
from ullage_common.wire.multiplex import serve_multiplex
from ullage_common.wire.request_fields import known_fields
from ullage_common.wire.servers import new_server

MODEL = "tiny"
BATCHES = (1, 16, 64, 256)
CLIENTS = 64
PROMPT = list(range(200))
POOL_BYTES = 1 << 40


class FakeEngine(
    inference_pb2_grpc.InferenceServiceServicer, headroom_pb2_grpc.HeadroomServiceServicer
):
    """An engine that answers at once with one token."""

    def __init__(self, name: str) -> None:
        self._headroom = headroom_pb2.Headroom(
            engine=name,
            epoch=1,
            model=MODEL,
            pool="single",
            ready=True,
            health=1.0,
            kv_pool_bytes=POOL_BYTES,
            headroom_bytes=POOL_BYTES,
            expected_output_tokens=32,
        )

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Any
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        while True:
            self._headroom.sequence += 1
            yield headroom_pb2.WatchHeadroomResponse(headroom=self._headroom)
            await asyncio.sleep(0.1)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        tokenizer = Tokenizer(models.BPE(vocab={chr(n + 300): n for n in range(256)}, merges=[]))
        return pb.GetModelResponse(
            model=MODEL,
            request_fields=sorted(known_fields()),
            tokenizer_json=tokenizer.to_str().encode(),
            max_model_len=8192,
            vocab_size=256,
            profile=pb.MemoryProfile(
                block_tokens=16,
                groups=[pb.CacheGroup(bytes_per_token=1000)],
                kv_pool_bytes=POOL_BYTES,
            ),
        )

    async def Multiplex(self, requests: object, context: Any) -> None:
        await serve_multiplex(self.Generate, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        accepted = pb.Accepted(request_id=request.request_id, engine=self._headroom.engine)
        yield pb.GenerateResponse(accepted=accepted)
        yield pb.GenerateResponse(delta=pb.Delta(text="x", num_tokens=1))
        usage = pb.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=1)
        reason = pb.FINISH_REASON_STOP
        yield pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage))


def run_engines(count: int, pipe: Connection) -> None:
    async def serve() -> None:
        ports = []
        for number in range(count):
            server = new_server()
            engine = FakeEngine(f"engine-{number}")
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)
            headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(engine, server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
        pipe.send(ports)
        await asyncio.Event().wait()

    uvloop.run(serve())


def run_router(document: dict[str, Any], pipe: Connection) -> None:
    async def serve() -> None:
        from ullage_common.config.router import RouterConfig
        from ullage_common.process.config_file import read_file
        from ullage_router.main import Router

        path = Path(document.pop("folder")) / "router.json"
        path.write_text(json.dumps(document))
        router = Router(read_file(path, RouterConfig))
        await router.start()
        while not router.service.is_ready:  # noqa: ASYNC110 - a benchmark may look
            await asyncio.sleep(0.01)
        pipe.send(router.grpc_port)
        await asyncio.Event().wait()

    uvloop.run(serve())


def entries(batch: int, is_like: bool) -> list[pb.PricedRequest]:
    """Return entries for `batch` requests: one per request, or a single one with their count."""
    if is_like:
        return [pb.PricedRequest(prompt_tokens=len(PROMPT), max_tokens=64, count=batch)]
    sizes = range(len(PROMPT), len(PROMPT) + batch)
    return [pb.PricedRequest(prompt_tokens=size, max_tokens=64) for size in sizes]


async def picks(port: int, batch: int, is_like: bool, seconds: float, at_once: int = 4) -> float:
    """Return the number of requests placed per second.

    Every placed request is reported as ended with a later Pick RPC.
    """
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = entries(batch, is_like)
        end = time.perf_counter() + seconds
        placed = 0

        async def ask() -> None:
            nonlocal placed
            ended: list[int] = []
            while time.perf_counter() < end:
                request = pb.PickRequest(requests=asked, accepted=ended, ended=ended)
                answer = await stub.Pick(request)
                ended = [p.id for p in answer.placed if p.ticket for _ in range(p.count)]
                placed += len(ended)

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return placed / (time.perf_counter() - started)


async def answers(port: int, is_direct: bool, seconds: float) -> float:
    """Return the number of complete answers per second with CLIENTS concurrent clients."""
    async with Client(f"127.0.0.1:{port}", is_direct=is_direct) as client:
        end = time.perf_counter() + seconds
        done = 0
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        request.stop.max_tokens = 64

        async def ask() -> None:
            nonlocal done
            while time.perf_counter() < end:
                async for _ in client.generate(request):
                    pass
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        return done / (time.perf_counter() - started)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(port: int, router: psutil.Process, seconds: float) -> None:
    for is_like, kind in ((False, "distinct"), (True, "like")):
        for batch in BATCHES:
            used = cpu_s(router)
            started = time.perf_counter()
            rate = await picks(port, batch, is_like, seconds)
            share = (cpu_s(router) - used) / (time.perf_counter() - started)
            per_core = f"{rate / share:>9,.0f} a second of its CPU"
            print(f"Pick, {batch:>3} {kind:<8} at once: {rate:>9,.0f} admitted/s, {per_core}")
    for is_direct, name in ((True, "with tickets"), (False, "through the router")):
        rate = await answers(port, is_direct, seconds)
        print(f"whole answers, {name:<18}: {rate:>9,.0f}/s, one client process")


def main() -> None:
    parser = new_parser("pick", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--engines", type=int, default=4)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")  # gRPC breaks after a fork

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.mkdir()
        (keys / "key").write_text("k" * 32)

        ours, theirs = context.Pipe()
        engines = context.Process(target=run_engines, args=(options.engines, theirs), daemon=True)
        engines.start()

        here: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
        document = {
            "model": MODEL,
            "http": here,
            "grpc": here,
            "metrics": here,
            "pools": [{"name": "single", "targets": [f"127.0.0.1:{p}" for p in ours.recv()]}],
            "tickets": {"keys_dir": str(keys)},
            "log_level": "error",
            "folder": folder,
        }

        router = context.Process(target=run_router, args=(document, theirs), daemon=True)
        router.start()

        try:
            uvloop.run(measure(ours.recv(), psutil.Process(router.pid), options.seconds))
        finally:
            router.terminate()
            engines.terminate()
