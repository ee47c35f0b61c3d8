"""Measures a running service's engines, and makes the hardware file for replays.

The engines compute made-up requests: single ones, batches of every size, and random mixtures. Their
own timelines say how long each step took, and the clients how much time passed outside of steps.
"""

import asyncio
import bisect
import contextlib
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from msgspec.structs import replace

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire import memory_profile
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.protocol.worker_state import ReservationState
from ullage_replay.cost import StepCost, StepSize, fit
from ullage_replay.hardware import VERSION, EngineHardware, Hardware, Overheads
from ullage_replay.play import ON_HOST, Played, Player
from ullage_replay.timeline import (
    EngineTimeline,
    TimedStep,
    pauses_between,
    read_timeline,
    trimmed_mean,
)
from ullage_replay.trace import TraceRequest

_PROFILE_STEPS = 1000
"""Steps of one timeline, which is the most that engines record."""
_PROFILE_MS = 5000
_RECORDS_S = 0.3
"""Seconds until a recording has surely begun."""
_NUM_SINGLE = 24
"""Single requests, which show what passes outside of steps."""
_SINGLE_OUTPUT = 6
_BATCH_OUTPUT = 48
_CONTEXTS = (32, 128, 384, 768, 1536)
"""Prompt lengths of batches in tokens, as far as the engine's memory holds them."""
_MIXED_S = 25.0
"""Seconds of the random mixture."""
_MIXED_LOADS = (0.35, 0.7)
"""Loads of the random mixtures, as shares of what the engine seems to manage."""
_TOGETHER = 0.8
"""Share of a step that must overlap with another engine's steps to count as slowed down."""

OnStage = Callable[[str], None]
"""Called with one line about what is being measured."""


class MeasureError(Exception):
    """The service cannot be measured. The message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where to reach one engine of a pool."""

    pool: str
    target: str
    """gRPC address."""


async def measure(
    router: str, addresses: Sequence[EngineAddress], on_stage: OnStage = lambda _: None
) -> Hardware:
    """Measure one engine of each pool, which must have no other requests.

    Args:
        router: gRPC address of the router.
        addresses: one engine of each pool.

    Raises:
        MeasureError: an engine cannot be reached, serves no profiles, or refuses all requests.
        FitError, TimelineError: the measurements do not determine a cost model.
    """
    engines = [_Engine(address) for address in addresses]
    try:
        for engine in engines:
            await engine.describe()
        return await _measure(router, engines, on_stage)
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        is_unknown = failure.code is grpc.StatusCode.UNIMPLEMENTED
        message = "it serves no profiles" if is_unknown else failure.message
        raise MeasureError(
            f"an engine or the router cannot be measured: {message}; start the service with "
            "`ullage up`, or set observability.profiling.enabled"
        ) from None
    finally:
        for engine in engines:
            await engine.close()


async def _measure(router: str, engines: Sequence["_Engine"], on_stage: OnStage) -> Hardware:
    measured: dict[str, EngineHardware] = {}
    for engine in engines:
        on_stage(f"pool {engine.pool}: batches of every size")
        async with _Recorder(engine) as batches:
            answers = await engine.play_batches()
        _check_answers(f"pool {engine.pool}: batches", answers)
        cost = fit([step.measured for step in batches.steps])

        # Ordinary requests go through the router, whose work takes time of the same cores. It
        # would send them to the first pool.
        target = router if engine is engines[0] else engine.target
        player = Player(target, engine.model.vocab_size)
        try:
            on_stage(f"pool {engine.pool}: single requests")
            singles, single_steps = await _play_singles(engine, player)
            _check_answers(f"pool {engine.pool}: single requests", singles.values())
            on_stage(f"pool {engine.pool}: random mixtures")
            mixed: dict[str, Played] = {}
            async with _Recorder(engine) as mixtures:
                for load in _MIXED_LOADS:
                    name = f"{engine.pool}-{load}-"
                    answers = await player.play(engine.mixture(cost, load), name=name)
                    mixed |= {f"{name}{number}": each for number, each in enumerate(answers)}
            _check_answers(f"pool {engine.pool}: random mixtures", mixed.values())
        finally:
            await player.close()

        steps = [*batches.steps, *mixtures.steps]
        overheads = Overheads(
            before=_mean_before(singles, single_steps),
            after=_mean_after({**singles, **mixed}, [*single_steps, *mixtures.steps]),
            between_steps=pauses_between(steps),
        )
        if measured:  # the way through the router is the same to all pools
            first = next(iter(measured.values())).overheads
            overheads = replace(overheads, before=first.before, after=first.after)
        cost = fit([step.measured for step in steps])
        measured[engine.pool] = engine.hardware(batches.latest, cost, overheads)

    slowdown: dict[int, float] = {}
    if len(engines) > 1:
        on_stage("all pools at once")
        slowdown = await _slowdown(engines, measured)
    return Hardware(
        version=VERSION,
        processor=processor_name(),
        model=engines[0].model.model,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        engines=measured,
        slowdown=slowdown,
    )


def _check_answers(stage: str, answers: Iterable[Played]) -> None:
    """Raise an error if all requests of a stage failed, so that nothing was measured."""
    errors = [answer.error for answer in answers]
    if errors and all(errors):
        raise MeasureError(
            f"{stage}: all {len(errors)} requests failed, the first one with {errors[0]}; look for "
            "it in the service's logs, and measure again once a request is answered"
        )


class _Engine:
    """One engine that is measured, with connections to its services."""

    def __init__(self, address: EngineAddress) -> None:
        self.pool = address.pool
        self.target = address.target
        self._channel = open_channel(address.target)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.model = pb.GetModelResponse()
        self._headroom = headroom_pb2.Headroom()
        self._draw = random.Random(0)

    async def describe(self) -> None:
        """Ask the engine what it is."""
        inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        headroom: Any = headroom_pb2_grpc.HeadroomServiceStub(self._channel)
        self.model = await inference.GetModel(pb.GetModelRequest())
        answer = await headroom.GetHeadroom(headroom_pb2.GetHeadroomRequest())
        self._headroom = answer.headroom
        self._profile = memory_profile.from_wire(self.model.profile)
        self.player = Player(self.target, self.model.vocab_size)

    async def close(self) -> None:
        """Close the connections."""
        await self._channel.close()
        if self.model.vocab_size:
            await self.player.close()

    async def profile(self) -> bytes:
        """Record the next steps, and return the timeline's file."""
        request = admin_pb2.ProfileRequest(
            kind="PROFILE_KIND_TIMELINE", steps=_PROFILE_STEPS, timeout_ms=_PROFILE_MS
        )
        return b"".join([each.chunk async for each in self._admin.Profile(request)])

    async def play_batches(self) -> list[Played]:
        """Compute batches of every size up to the engine's largest, with contexts of all lengths.

        The engine's memory limits the product of the two. Return the answers.
        """
        answers: list[Played] = []
        profile = self._profile
        tokens = 0.9 * profile.kv_pool_bytes / profile.growing_bytes_per_token
        most = self._headroom.max_sequences
        for size in sorted({*(1 << power for power in range(most.bit_length())), most}):
            for context in _CONTEXTS:
                output = max(12, _BATCH_OUTPUT // size)
                if size * (context + output) > tokens or context + output >= self._longest:
                    continue
                requests = [self._request(context, output) for _ in range(size)]
                sent = (
                    self.player.send(request, f"{self.pool}-{size}-{context}-{number}")
                    for number, request in enumerate(requests)
                )
                answers += await asyncio.gather(*sent)
        return answers

    def mixture(self, cost: StepCost, load: float) -> list[TraceRequest]:
        """Return a random mixture that takes about this share of the engine's time."""
        requests: list[TraceRequest] = []
        at = 0.0
        while at < _MIXED_S:
            prompt = min(self._longest // 4, 16 + int(self._draw.lognormvariate(5.0, 0.9)))
            output = self._draw.randint(4, 96)
            request = self._request(prompt, output)
            requests.append(replace(request, at=at))
            alone = cost.seconds(StepSize(0, prompt, 0, prompt * prompt / 2))
            shared = cost.seconds(StepSize(4, 0, 4 * prompt, 0)) / 4
            at += self._draw.expovariate(load / (alone + output * shared))
        return requests

    def hardware(
        self, timeline: EngineTimeline, cost: StepCost, overheads: Overheads
    ) -> EngineHardware:
        """Return the engine's part of the hardware file."""
        facts = self.model.fingerprint_facts
        return EngineHardware(
            gpus=max(1, len(self.model.ranks)),
            device=facts.get("device", "cpu"),
            dtype=facts.get("dtype", ""),
            quantization=facts.get("quantization", ""),
            kv_dtype=facts.get("kv_dtype", ""),
            max_model_len=self.model.max_model_len,
            profile=self._profile,
            limits=timeline.limits,
            total_bytes=self._headroom.total_bytes,
            threshold=self._headroom.threshold,
            ledger=tuple(
                ReservationState(
                    name=entry.name,
                    reserved_bytes=entry.reserved_bytes,
                    allocated_bytes=entry.allocated_bytes,
                    on_host=entry.name in ON_HOST,
                )
                for entry in self._headroom.ledger
            ),
            longest_step_s=timeline.longest_step_s,
            cost=cost,
            overheads=overheads,
        )

    @property
    def _longest(self) -> int:
        return self.model.max_model_len

    def _request(self, prompt_tokens: int, output_tokens: int) -> TraceRequest:
        return TraceRequest(at=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


class _Recorder:
    """Records an engine's steps while its `with` block runs."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._is_ending = False
        self._timelines: list[EngineTimeline] = []

    @property
    def latest(self) -> EngineTimeline:
        return self._timelines[-1]

    @property
    def steps(self) -> list[TimedStep]:
        """All steps, oldest first."""
        return [step for timeline in self._timelines for step in timeline.steps]

    async def __aenter__(self) -> "_Recorder":
        self._task = asyncio.create_task(self._record())
        await asyncio.sleep(_RECORDS_S)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_ending = True
        await self._task

    async def _record(self) -> None:
        while not self._is_ending:
            self._timelines.append(read_timeline(await self._engine.profile()))


async def _play_singles(
    engine: _Engine, player: Player
) -> tuple[dict[str, Played], list[TimedStep]]:
    """Send one request after the other, and return the answers by request id, and the steps."""
    answers: dict[str, Played] = {}
    async with _Recorder(engine) as recorder:
        for number in range(_NUM_SINGLE):
            name = f"{engine.pool}-single-{number}"
            prompt = (32, 64, 128, 256)[number % 4]
            request = TraceRequest(at=0.0, prompt_tokens=prompt, output_tokens=_SINGLE_OUTPUT)
            answers[name] = await player.send(request, name)
    return answers, recorder.steps


def _mean_before(answers: Mapping[str, Played], steps: Sequence[TimedStep]) -> float:
    """Return the seconds between sending a request and its first step, if the engine is idle."""
    first: dict[str, TimedStep] = {}
    for step in steps:
        for request_id in step.request_ids:
            first.setdefault(request_id, step)
    waits = [
        first[name].began_unix - played.sent_unix
        for name, played in answers.items()
        if name in first
    ]
    if not waits:
        raise MeasureError("no step has one of the requests that were sent; measure again")
    return max(0.0, trimmed_mean(waits))


def _mean_after(answers: Mapping[str, Played], steps: Sequence[TimedStep]) -> float:
    """Return the seconds from the end of a step until the client has its first token."""
    of_request: dict[str, list[TimedStep]] = {}
    for step in steps:
        for request_id in step.request_ids:
            of_request.setdefault(request_id, []).append(step)
    delays = []
    for name, played in answers.items():
        if played.ttft_s is None:
            continue
        came_at = played.sent_unix + played.ttft_s
        ended = [s.ended_unix for s in of_request.get(name, ()) if s.ended_unix <= came_at]
        if ended:
            delays.append(came_at - max(ended))
    return trimmed_mean(delays) if delays else 0.0


async def _slowdown(
    engines: Sequence[_Engine], measured: Mapping[str, EngineHardware]
) -> dict[int, float]:
    """Return the factor by which steps take longer while another engine computes, too."""
    recorders = [_Recorder(engine) for engine in engines]
    async with contextlib.AsyncExitStack() as stack:
        for recorder in recorders:
            await stack.enter_async_context(recorder)
        plays = [each.player.play(each.mixture(measured[each.pool].cost, 0.9)) for each in engines]
        answers = await asyncio.gather(*plays)
    for engine, played in zip(engines, answers, strict=True):
        _check_answers(f"pool {engine.pool}: all pools at once", played)

    seconds = predicted = 0.0
    for engine, recorder in zip(engines, recorders, strict=True):
        others = [step for other in recorders if other is not recorder for step in other.steps]
        for step in _overlapped(recorder.steps, others):
            seconds += step.measured.seconds
            predicted += measured[engine.pool].cost.seconds(step.measured.size)
    return {2: max(1.0, seconds / predicted)} if predicted else {}


def _overlapped(steps: Sequence[TimedStep], others: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps that one of the others accompanied for most of their time."""
    spans = sorted((other.began_unix, other.ended_unix) for other in others)
    starts = [began for began, _ in spans]
    result = []
    for step in steps:
        shared = 0.0
        index = max(0, bisect.bisect_left(starts, step.began_unix) - 1)
        for began, ended in spans[index:]:
            if began >= step.ended_unix:
                break
            shared += max(0.0, min(ended, step.ended_unix) - max(began, step.began_unix))
        if shared >= _TOGETHER * step.measured.seconds:
            result.append(step)
    return result


def processor_name() -> str:
    """Return the name of this machine's processor and its number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} threads"
