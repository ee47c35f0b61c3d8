"""Plays a trace in real time against a running service, and records what its clients would see."""

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import from_rpc_error
from ullage_replay.tokens import TokenSource
from ullage_replay.trace import TraceRequest

_LEAST_TOKEN = 300
"""Tokens below this number may be special ones, which prompts leave out."""
_MIXING = 2654435761
_REPORT_MS = 20
ON_HOST = frozenset({"kv_host_tier", "pinned_host_kv"})
"""Reservations of host memory, which do not count against a device's budget."""


@dataclass(slots=True)
class Played:
    """What one request's client saw."""

    request: TraceRequest
    sent_unix: float = 0.0
    ttft_s: float | None = None
    end_s: float = 0.0
    output_tokens: int = 0
    action: str = ""
    """The router's action, empty if the request was refused before it had one."""
    error: str = ""
    """Reason of the error with which the request ended, or empty."""
    token_gaps_s: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class WatchedEngine:
    """One engine's memory, as its reports showed it."""

    peak_kv_bytes: int = 0
    """Most KV bytes in block tables in any step since the engine's start."""
    peak_promised_bytes: int = 0
    """Most KV bytes in block tables or reserved for admitted requests since the engine's start."""
    memory_bytes: int = 0
    """Bytes of all allocations on the device, with the whole KV pool."""
    budget_bytes: int = 0
    num_reports: int = 0

    def note(self, report: headroom_pb2.Headroom) -> None:
        """Take a report into account."""
        self.peak_kv_bytes = max(self.peak_kv_bytes, report.kv_peak_bytes)
        self.peak_promised_bytes = max(self.peak_promised_bytes, report.kv_peak_promised_bytes)
        self.memory_bytes = sum(
            entry.allocated_bytes for entry in report.ledger if entry.name not in ON_HOST
        )
        self.budget_bytes = int(report.total_bytes * report.threshold)
        self.num_reports += 1


class WatchError(Exception):
    """Raised if the memory of an engine could not be watched to the end."""


class Player:
    """Sends requests with made-up tokens to a router or an engine.

    Args:
        target: gRPC address of the router or engine.
        vocab_size: size of the model's vocabulary.
    """

    def __init__(self, target: str, vocab_size: int) -> None:
        self._channel = open_channel(target)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._vocab_size = vocab_size
        self._tokens = TokenSource()
        # Prompts of an earlier play must not be cached.
        self._salt = secrets.token_hex(8)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def play(
        self,
        trace: Sequence[TraceRequest],
        on_progress: Callable[[int], None] = lambda _: None,
        name: str = "",
    ) -> list[Played]:
        """Send each request at its time, and return what the clients saw, in order of arrival."""
        began = asyncio.get_running_loop().time()
        tasks = []
        for number, request in enumerate(trace):
            await asyncio.sleep(began + request.at - asyncio.get_running_loop().time())
            tasks.append(asyncio.create_task(self.send(request, f"{name}{number}")))
            on_progress(number)
        return [await task for task in tasks]

    async def send(self, request: TraceRequest, request_id: str) -> Played:
        """Send one request, and read its answer to the end."""
        played = Played(request)
        wanted = self._wanted(request, request_id)
        began = time.perf_counter()
        played.sent_unix = time.time()
        last_at = 0.0
        try:
            async for event in self._stub.Generate(wanted):
                now = time.perf_counter()
                kind = event.WhichOneof("event")
                if kind == "accepted":
                    played.action = event.accepted.action
                elif kind == "delta" and (count := event.delta.num_tokens):
                    if played.ttft_s is None:
                        played.ttft_s = now - began
                    else:
                        played.token_gaps_s.extend([(now - last_at) / count] * count)
                    last_at = now
                    played.output_tokens += count
        except grpc.aio.AioRpcError as error:
            played.error = from_rpc_error(error).reason or error.code().name
        played.end_s = time.perf_counter() - began
        return played

    def _wanted(self, request: TraceRequest, request_id: str) -> pb.GenerateRequest:
        tokens = self._tokens.prompt(request)
        wanted = pb.GenerateRequest(
            request_id=request_id,
            token_ids=pb.TokenIds(ids=map(self._in_vocabulary, tokens)),
            session_id=request.session,
            cache_salt=self._salt,
            priority=request.priority,
        )
        wanted.sampling.temperature = 0.0
        # A model cannot be told when to stop, so the limit does.
        wanted.stop.max_tokens = min(request.output_tokens, request.max_tokens or 1 << 30)
        wanted.stop.ignore_eos = True
        return wanted

    def _in_vocabulary(self, token: int) -> int:
        mixed = token * _MIXING & 0xFFFFFFFF
        return _LEAST_TOKEN + mixed % (self._vocab_size - _LEAST_TOKEN)


@contextlib.asynccontextmanager
async def watching(targets: Mapping[str, str]) -> AsyncIterator[Mapping[str, WatchedEngine]]:
    """Follow the reports of engines, by name and gRPC address, until the block ends.

    Raises:
        WatchError: an engine's reports ended before the block, so its figures are incomplete.
    """
    watched = {name: WatchedEngine() for name in targets}
    tasks = {
        name: asyncio.create_task(_watch(target, watched[name])) for name, target in targets.items()
    }
    try:
        yield watched
        for name, task in tasks.items():
            if task.done():
                raise WatchError(
                    f"the reports of {name} at {targets[name]} ended early: {_reason_of(task)}; "
                    "look into its log, and measure again"
                )
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _reason_of(watch: "asyncio.Task[None]") -> str:
    """Return why a stream of reports has ended."""
    error = watch.exception()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error) if error else "the engine closed the stream"


async def _watch(target: str, watched: WatchedEngine) -> None:
    channel = open_channel(target)
    try:
        stub: Any = headroom_pb2_grpc.HeadroomServiceStub(channel)
        request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=_REPORT_MS)
        async for push in stub.WatchHeadroom(request):
            watched.note(push.headroom)
    finally:
        await channel.close()
