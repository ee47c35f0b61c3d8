"""What the pressure level takes from a new request, and how the client is told.

Applied once, when a request is accepted; one that is resumed under a new worker keeps what it was
promised. The words are those of the router: `max_tokens=512`, `temperature=0`, `top_p=0.7`.
"""

import dataclasses

import msgspec

from ullage_engine.config import DegradeLevel, DegradeSection
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.memory.pressure import level_at
from ullage_engine.messages import WorkerState
from ullage_engine.server.job import Job


def degrade(job: Job, section: DegradeSection, state: WorkerState | None) -> Job:
    """The job under the level that the worker's last state names; `job.degraded` says the rest."""
    level = level_at(section, state.pressure_level if state else 0)
    if level is None:
        return job
    request = lowered(job.request, level, change_sampling=section.change_sampling)
    return dataclasses.replace(job, request=request, degraded=changes(job.request, request))


def lowered(request: EngineRequest, level: DegradeLevel, *, change_sampling: bool) -> EngineRequest:
    """The request within a level's limits; nothing is ever raised."""
    sampling = request.sampling
    if change_sampling and request.beam is None:
        sampling = _lowered_sampling(sampling, level)
    limit = level.max_output_tokens
    max_tokens = request.max_tokens if limit is None else min(limit, request.max_tokens)
    return msgspec.structs.replace(request, max_tokens=max_tokens, sampling=sampling)


def changes(before: EngineRequest, after: EngineRequest) -> tuple[str, ...]:
    """What differs, in the words that the client is told."""
    pairs = (
        ("max_tokens", before.max_tokens, after.max_tokens),
        ("temperature", before.sampling.temperature, after.sampling.temperature),
        ("top_p", before.sampling.top_p, after.sampling.top_p),
    )
    return tuple(f"{name}={new:.10g}" for name, old, new in pairs if new != old)


def _lowered_sampling(sampling: SamplingParams, level: DegradeLevel) -> SamplingParams:
    temperature = _capped(sampling.temperature, level.max_temperature)
    # A greedy choice has no use for top_p.
    top_p = _capped(sampling.top_p, level.max_top_p) if temperature > 0 else sampling.top_p
    return msgspec.structs.replace(sampling, temperature=temperature, top_p=top_p)


def _capped(value: float, most: float | None) -> float:
    """At most `most`. Values came as float32, so 0.8 arrives a little larger and is no excess."""
    return value if most is None or float(f"{value:.7g}") <= most else most
