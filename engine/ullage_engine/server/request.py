"""Validation of a Generate call, and its conversion into an engine request.

All fields are checked and the limits applied, but nothing is sent to a worker. Errors are
ServiceErrors with INVALID_ARGUMENT, which name the field, or with NOT_FOUND. A call may ask for
several samples, each with its own seed.

Under memory pressure, a new request's limits are lowered once, when the request is accepted. A
request that is resumed on a new worker keeps its granted limits. The client sees the changes in the
form that the router writes: `max_tokens=512`, `temperature=0`, `top_p=0.7`.
"""

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import grpc
import msgspec

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import DegradeLevel, DegradeSection, LimitsSection
from ullage_common.wire.errors import ServiceError, invalid, served_names
from ullage_common.wire.limits import SAMPLING_RANGES
from ullage_common.wire.validation import (
    check_prompt_tokens,
    check_task,
    check_vocabulary,
    invalid_value,
    num_answers,
    validate_request,
)
from ullage_engine.memory.pressure import level_at
from ullage_engine.protocol.request_events import ServedRequest
from ullage_engine.protocol.requests import BeamParams, EngineRequest, SamplingParams
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.tokenizer.generation import SamplingDefaults

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How many answers to one prompt are generated and how many are returned."""

    n: int = 1
    """Number of returned answers."""
    num_generated: int = 1
    """Number of generated answers, or of hypotheses in a beam search."""
    beam: BeamParams | None = None

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that are computed at the same time."""
        return self.beam.width if self.beam else self.num_generated

    @property
    def is_ranked(self) -> bool:
        """Return whether only the best of the generated answers are returned."""
        return self.num_generated > self.n

    @property
    def is_streamed(self) -> bool:
        """Return whether text is sent as it is generated, rather than all at the end."""
        return not self.is_ranked and self.beam is None


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index`: (seed + index * 0x9E3779B97F4A7C15) mod 2^64.

    The first answer has the request's own seed. The stride is odd, so no two answers share a seed.
    A request for a single answer with such a seed gets the same answer.
    """
    return (seed + index * _SEED_STRIDE) % _SEEDS


def sample_plan(samples: pb.Samples) -> SamplePlan:
    """Return the sample plan for sampling settings that were already checked."""
    n = num_answers(samples)
    if not samples.HasField("beam"):
        return SamplePlan(n, samples.best_of if samples.HasField("best_of") else n)
    beam = samples.beam
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return SamplePlan(n, n, BeamParams(width=beam.width, length_penalty=penalty))


Reason = Literal["stop", "length", "timeout", "cancelled"]

_REASONS: dict[int, Reason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIMEOUT: "timeout",
}


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The part of an answer that the client has received from another engine."""

    token_ids: list[int]
    text_length: int
    """Number of characters of text that the client has received."""
    reason: Reason | None
    """Why the answer ended, or None if the client has not seen its end."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the loaded model that limit a request."""

    name: str
    adapters: Mapping[str, str]
    """The worker's keys of its LoRA adapters, by the names that clients use."""
    task: pb.Task
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults = field(default_factory=dict)
    """Sampling parameters of requests that leave them unset."""


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A checked request, or one of its samples."""

    client_id: str
    """The client's name for the request, or one generated here."""
    request: EngineRequest
    stop_strings: tuple[str, ...]
    return_token_ids: bool
    """Whether the Accepted message includes the prompt's token ids."""
    echo: bool
    special_tokens: bool = False
    """Whether special tokens appear in the text."""
    samples: SamplePlan = field(default_factory=SamplePlan)
    degraded: tuple[str, ...] = ()
    """Limits that were lowered because memory is short, as `name=value`."""
    delta_token_ids: bool = False
    """Whether deltas include token ids."""
    served: ServedRequest | None = None
    """The request's log lines and trace span, or None if the request is not logged."""
    received: tuple[PartialAnswer, ...] = ()
    """The part of each answer that the client has already received, empty for a new request."""

    @property
    def num_received_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.received)


def check_request(request: pb.GenerateRequest, model: ModelLimits) -> None:
    """Check all fields that do not depend on the prompt's tokens, before tokenisation.

    Raises:
        ServiceError: a field is out of range, or the model is not served here.
    """
    check_model(request.model, model.name, model.adapters)
    validate_request(request)
    check_task(request, model.task, request.model or model.name)
    _check_vocabulary(request, model.vocab_size)
    _check_support(request, model)


def check_model(asked: str, served: str, adapters: Collection[str]) -> None:
    """Check that a request names the served model (the default) or one of its adapters.

    Raises:
        ServiceError: NOT_FOUND, for any other model.
    """
    if asked not in ("", served, *adapters):
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model {asked!r} is not served here; ask for {served_names(served, adapters)}",
            metadata={"field": "model", "model": asked},
        )


def validated_request(
    request: pb.GenerateRequest,
    prompt_ids: list[int],
    key: str,
    model: ModelLimits,
    limits: LimitsSection,
    grammar: str = "",
) -> ValidatedRequest:
    """Build the validated request of a call whose fields were checked.

    The output limit is capped at the model's maximum length minus the prompt's length.

    Args:
        grammar: the request's grammar in the form that workers compile, empty without one.

    Raises:
        ServiceError: the prompt is empty, has tokens outside the model's vocabulary, or leaves no
            room for output.
    """
    num_prompt = len(prompt_ids)
    # A tokenizer may know more tokens than the model has.
    check_prompt_tokens(prompt_ids, model.vocab_size)
    least_output = 0 if request.embed else 1
    if num_prompt + least_output > model.max_model_len:
        raise _too_long(num_prompt, model.max_model_len, least_output)
    if request.embed:
        return _validated_embedding(request, prompt_ids, key, model)
    max_tokens = min(limits.max_output_tokens, model.max_model_len - num_prompt)
    if request.stop.HasField("max_tokens"):
        max_tokens = min(max_tokens, request.stop.max_tokens)
    samples = sample_plan(request.samples)
    engine_request = EngineRequest(
        request_id=key,
        token_ids=prompt_ids,
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        min_tokens=min(request.stop.min_tokens, max_tokens),
        sampling=_sampling(request, model.sampling_defaults),
        stop_token_ids=_stop_token_ids(request.stop, model.eos_token_ids),
        priority=request.priority,
        session_id=request.session_id,
        cache_salt=request.cache_salt,
        beam=samples.beam,
        grammar=grammar,
        adapter=model.adapters.get(request.model, ""),
    )
    return ValidatedRequest(
        client_id=request.request_id or key,
        request=engine_request,
        stop_strings=tuple(request.stop.stop_strings),
        return_token_ids=request.output.return_token_ids,
        delta_token_ids=request.output.return_token_ids or request.output.delta_token_ids,
        echo=request.output.echo,
        special_tokens=request.output.special_tokens,
        samples=samples,
        received=tuple(
            PartialAnswer(list(one.token_ids), one.text_length, _REASONS.get(one.reason))
            for one in request.continuation.answers
        ),
    )


def _validated_embedding(
    request: pb.GenerateRequest, prompt_ids: list[int], key: str, model: ModelLimits
) -> ValidatedRequest:
    engine_request = EngineRequest(
        request_id=key,
        token_ids=prompt_ids,
        num_prompt_tokens=len(prompt_ids),
        max_tokens=0,
        sampling=SamplingParams(),
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=model.adapters.get(request.model, ""),
        embed=True,
    )
    client_id = request.request_id or key
    return ValidatedRequest(client_id, engine_request, (), return_token_ids=False, echo=False)


def _too_long(num_prompt: int, max_model_len: int, least_output: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_TOO_LONG",
        f"the prompt has {num_prompt} tokens and the model's length is {max_model_len}; "
        f"send at most {max_model_len - least_output}",
        metadata={
            "field": "input",
            "prompt_tokens": str(num_prompt),
            "max_model_len": str(max_model_len),
        },
    )


def _sampling(request: pb.GenerateRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Convert sampling parameters, and choose the seed if the request has none.

    Unset fields get the model's defaults, or else the API's defaults.
    """
    given = {**defaults, **{field.name: value for field, value in request.sampling.ListFields()}}
    # 53 bits, so that a JSON number can carry the seed back to the client.
    given["logit_bias"] = dict(request.sampling.logit_bias)
    given.setdefault("seed", secrets.randbits(53))
    if request.output.HasField("top_logprobs"):
        given["top_logprobs"] = request.output.top_logprobs
    return SamplingParams(**given)


def _stop_token_ids(stop: pb.StopConditions, eos_token_ids: tuple[int, ...]) -> list[int]:
    ends = () if stop.ignore_eos else eos_token_ids
    return sorted({*stop.stop_token_ids, *ends})


def _check_vocabulary(request: pb.GenerateRequest, vocab_size: int) -> None:
    check_vocabulary("logit_bias", request.sampling.logit_bias, vocab_size)
    check_vocabulary("stop_token_ids", request.stop.stop_token_ids, vocab_size)
    for answer in request.continuation.answers:
        check_vocabulary("continuation", answer.token_ids, vocab_size)


def _check_support(request: pb.GenerateRequest, model: ModelLimits) -> None:
    if request.HasField("grammar") and not model.eos_token_ids:
        raise invalid("grammar", "grammar: the model has no end-of-sequence token; leave it out")
    if request.messages.HasField("tools"):
        raise invalid("tools", "tools are not served by an engine; ask a router, or send none")


def degrade(
    job: ValidatedRequest, section: DegradeSection, state: WorkerState | None
) -> ValidatedRequest:
    """Lower limits by the worker's last pressure level, and list the changes in `degraded`."""
    level = level_at(section, state.pressure_level if state else 0)
    if level is None:
        return job
    request = lowered(job.request, level, change_sampling=section.change_sampling)
    return dataclasses.replace(job, request=request, degraded=changes(job.request, request))


def keep_degraded(job: ValidatedRequest, changes: Sequence[str]) -> ValidatedRequest:
    """Lower the limits in the same way as the engine that first accepted the request.

    Raises:
        ServiceError: a listed change is not one that engines make.
    """
    request = job.request
    sampling = job.request.sampling
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = float(text)
        except ValueError as error:
            raise _unknown_change(change) from error
        if name == "max_tokens" and value >= 1:
            limit = min(request.max_tokens, int(value))
            request = msgspec.structs.replace(request, max_tokens=limit)
        elif name in ("temperature", "top_p") and value in SAMPLING_RANGES[name]:
            sampling = msgspec.structs.replace(sampling, **{name: value})
        else:
            raise _unknown_change(change)
    request = msgspec.structs.replace(request, sampling=sampling)
    return dataclasses.replace(job, request=request, degraded=tuple(changes))


def _unknown_change(change: str) -> ServiceError:
    permitted = "max_tokens=N, temperature=X and top_p=X, as Accepted has them"
    return invalid_value("continuation.degraded", change, permitted)


def lowered(request: EngineRequest, level: DegradeLevel, *, change_sampling: bool) -> EngineRequest:
    """Return the request with limits lowered to a pressure level's limits. None is raised."""
    sampling = request.sampling
    if change_sampling and request.beam is None:
        sampling = _lowered_sampling(sampling, level)
    limit = level.max_output_tokens
    max_tokens = request.max_tokens if limit is None else min(limit, request.max_tokens)
    return msgspec.structs.replace(request, max_tokens=max_tokens, sampling=sampling)


def changes(before: EngineRequest, after: EngineRequest) -> tuple[str, ...]:
    """List the changed limits as `name=value`, the form that clients read."""
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


def _capped(value: float, limit: float | None) -> float:
    """Return the value capped at `limit`, comparing both as float32.

    Values arrive as float32, so 0.8 is slightly above 0.8 but within its limit.
    """
    return value if limit is None or float(f"{value:.7g}") <= limit else limit
