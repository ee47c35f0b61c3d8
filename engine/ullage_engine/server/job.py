"""From a Generate call to a job: every field checked, limits applied, nothing sent yet.

Errors are ServiceError with INVALID_ARGUMENT (the field is named) or NOT_FOUND.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.config import LimitsSection
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.server.sample_plan import SamplePlan, check_samples, sample_plan
from ullage_rpc.errors import ServiceError, invalid
from ullage_rpc.limits import (
    LOGIT_BIAS,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_REQUEST_ID_BYTES,
    MAX_SESSION_ID_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    ROLES,
    SAMPLING_RANGES,
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Facts of the loaded model that bound a request."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request; each of its samples has one like it."""

    client_id: str
    """The client's name for it, or one made here."""
    request: EngineRequest
    stop_strings: tuple[str, ...]
    return_token_ids: bool
    echo: bool
    special_tokens: bool = False
    """Special tokens are text too."""
    samples: SamplePlan = field(default_factory=SamplePlan)
    degraded: tuple[str, ...] = ()
    """What was lowered because memory is short; see `ullage_engine.server.degrade`."""


def check_request(request: pb.GenerateRequest, model: ModelLimits) -> None:
    """Checks all that does not depend on the prompt's tokens; cheap, so done before tokenising.

    Raises:
        ServiceError: a field is out of range, or the model is another one.
    """
    check_model(request.model, model.name)
    _check_bytes("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    _check_bytes("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    if abs(request.priority) > MAX_PRIORITY:
        raise invalid(
            "priority", f"priority is {request.priority}; give -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    _check_sampling(request.sampling)
    _check_logit_bias(request.sampling, model.vocab_size)
    _check_stop(request.stop, model.vocab_size)
    _check_grammar(request, model)
    _check_output(request.output)
    check_samples(request)
    _check_input(request, model.vocab_size)


def check_model(asked: str, served: str) -> None:
    """Empty means the only model.

    Raises:
        ServiceError: NOT_FOUND, for any other model.
    """
    if asked not in ("", served):
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model {asked!r} is not served here; ask for {served!r}",
            metadata={"field": "model", "model": asked},
        )


def build_job(
    request: pb.GenerateRequest,
    prompt_ids: list[int],
    key: str,
    model: ModelLimits,
    limits: LimitsSection,
    grammar: str = "",
) -> Job:
    """The job of a request, checked like its `grammar`, which is in the form that workers compile.

    The output limit is cut to what the model's length leaves.

    Raises:
        ServiceError: the prompt is empty or leaves no room for output.
    """
    num_prompt = len(prompt_ids)
    if not num_prompt:
        raise invalid("input", "the prompt has no tokens; send at least one")
    if num_prompt >= model.max_model_len:
        raise _too_long(num_prompt, model.max_model_len)
    wanted = limits.max_output_tokens
    if request.stop.HasField("max_tokens"):
        wanted = min(wanted, request.stop.max_tokens)
    samples = sample_plan(request.samples)
    max_tokens = min(wanted, model.max_model_len - num_prompt)
    engine_request = EngineRequest(
        request_id=key,
        token_ids=prompt_ids,
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        min_tokens=min(request.stop.min_tokens, max_tokens),
        sampling=_sampling(request),
        stop_token_ids=_stop_token_ids(request.stop, model.eos_token_ids),
        priority=request.priority,
        session_id=request.session_id,
        beam=samples.beam,
        grammar=grammar,
    )
    return Job(
        client_id=request.request_id or key,
        request=engine_request,
        stop_strings=tuple(request.stop.stop_strings),
        return_token_ids=request.output.return_token_ids,
        echo=request.output.echo,
        special_tokens=request.output.special_tokens,
        samples=samples,
    )


def _too_long(num_prompt: int, max_model_len: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_TOO_LONG",
        f"the prompt has {num_prompt} tokens and the model's length is {max_model_len}; "
        f"send at most {max_model_len - 1}",
        metadata={
            "field": "input",
            "prompt_tokens": str(num_prompt),
            "max_model_len": str(max_model_len),
        },
    )


def _sampling(request: pb.GenerateRequest) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams; the seed is fixed here, once."""
    given = {field.name: value for field, value in request.sampling.ListFields()}
    # 53 bits: a seed survives a JSON number on its way back to the client.
    given["logit_bias"] = dict(request.sampling.logit_bias)
    given.setdefault("seed", secrets.randbits(53))
    if request.output.HasField("top_logprobs"):
        given["top_logprobs"] = request.output.top_logprobs
    return SamplingParams(**given)


def _stop_token_ids(stop: pb.StopConditions, eos_token_ids: tuple[int, ...]) -> list[int]:
    ends = () if stop.ignore_eos else eos_token_ids
    return sorted({*stop.stop_token_ids, *ends})


def _check_bytes(field: str, value: str, limit: int) -> None:
    size = len(value.encode())
    if size > limit:
        raise invalid(field, f"{field} has {size} bytes; give at most {limit}")


def _check_sampling(sampling: pb.SamplingParams) -> None:
    for descriptor, value in sampling.ListFields():
        allowed = SAMPLING_RANGES.get(descriptor.name)
        if allowed is not None and value not in allowed:
            field = f"sampling.{descriptor.name}"
            raise invalid(field, f"{field} is {value:g}; give a number {allowed}")


def _check_logit_bias(sampling: pb.SamplingParams, vocab_size: int) -> None:
    field, bias = "sampling.logit_bias", sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid(field, f"{field} has {len(bias)} tokens; give at most {MAX_LOGIT_BIAS}")
    _check_ids(field, bias, vocab_size)
    for token, value in bias.items():
        if value not in LOGIT_BIAS:
            at = f"{field}[{token}]"
            raise invalid(at, f"{at} is {value:g}; give a number {LOGIT_BIAS}")


def _check_grammar(request: pb.GenerateRequest, model: ModelLimits) -> None:
    if not request.HasField("grammar"):
        return
    if request.stop.ignore_eos:
        field = "stop.ignore_eos"
        raise invalid(field, f"{field} is true with a grammar, which ends the answer; leave it out")
    if not model.eos_token_ids:
        raise invalid("grammar", "grammar: the model has no end-of-sequence token; leave it out")


def _check_stop(stop: pb.StopConditions, vocab_size: int) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "stop.max_tokens is 0; give at least 1")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        field, least = "stop.min_tokens", stop.min_tokens
        raise invalid(field, f"{field} is {least}; give at most max_tokens, {stop.max_tokens}")
    if (count := len(stop.stop_token_ids)) > MAX_STOP_TOKENS:
        field = "stop.stop_token_ids"
        raise invalid(field, f"{field} has {count} tokens; give at most {MAX_STOP_TOKENS}")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        count = len(stop.stop_strings)
        raise invalid("stop.stop_strings", f"{count} stop strings; give at most {MAX_STOP_STRINGS}")
    for text in stop.stop_strings:
        if not text:
            raise invalid("stop.stop_strings", "a stop string is empty; leave it out")
        _check_bytes("stop.stop_strings", text, MAX_STOP_BYTES)
    _check_ids("stop.stop_token_ids", stop.stop_token_ids, vocab_size)


def _check_output(output: pb.OutputOptions) -> None:
    if output.HasField("top_logprobs") and output.top_logprobs > MAX_TOP_LOGPROBS:
        raise invalid(
            "output.top_logprobs",
            f"output.top_logprobs is {output.top_logprobs}; give 0 to {MAX_TOP_LOGPROBS}",
        )


def _check_input(request: pb.GenerateRequest, vocab_size: int) -> None:
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "no input; send token_ids, text or messages")
    if kind == "token_ids":
        _check_ids("token_ids.ids", request.token_ids.ids, vocab_size)
    elif kind == "messages":
        _check_messages(request.messages)


def _check_messages(messages: pb.Messages) -> None:
    if not messages.messages:
        raise invalid("messages.messages", "no messages; send at least one")
    for place, message in enumerate(messages.messages):
        if message.role not in ROLES:
            field = f"messages.messages[{place}].role"
            raise invalid(field, f"{field} is {message.role!r}; give {', '.join(ROLES)}")
    if messages.HasField("tools"):
        text = "messages.tools is not served by an engine; ask a router, or send none"
        raise invalid("messages.tools", text)


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        message = f"{field}: token {largest} is not in the vocabulary; give 0 to {vocab_size - 1}"
        raise invalid(field, message)
