"""Validates a GenerateRequest from any API protocol.

Routers and engines share these checks, so they refuse the same values with the same errors. Checks
that depend on the model, for example on its vocabulary, are in the router and the engine.
"""

import math
from collections.abc import Collection, Iterable
from typing import Protocol

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_BEAM_STOP_TOKENS,
    MAX_BEAM_WIDTH,
    MAX_CACHE_SALT_BYTES,
    MAX_CALLS,
    MAX_FINGERPRINT_BYTES,
    MAX_FINGERPRINTS,
    MAX_GRAMMAR_BYTES,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_PROMPT_TOKENS,
    MAX_REQUEST_ID_BYTES,
    MAX_SAMPLES,
    MAX_SESSION_ID_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    ROLES,
    SAMPLING_RANGES,
)


def validate_request(request: inference_pb2.GenerateRequest) -> None:
    """Check all fields of a request that can be checked without a model.

    Raises:
        ServiceError: INVALID_ARGUMENT, with the first invalid field.
    """
    _check_identity(request)
    _check_input(request)
    _check_sampling(request.sampling)
    _check_stop(request.stop)
    _check_grammar(request)
    _check_reasoning(request.reasoning)
    _check_samples(request.samples)

    limit_s = request.step_limit_s
    permitted = "a finite number of seconds, at least 0"
    _require(0.0 <= limit_s < math.inf, "step_limit_s", limit_s, permitted)

    if request.embed:
        _check_embedding(request)
    if request.samples.HasField("beam"):
        _check_beam(request)
    if request.HasField("continuation"):
        _check_continuation(request)
    if request.output.HasField("top_logprobs"):
        top = request.output.top_logprobs
        _require(top <= MAX_TOP_LOGPROBS, "top_logprobs", top, f"0 to {MAX_TOP_LOGPROBS}")
    if request.output.HasField("prompt_logprobs"):
        top = request.output.prompt_logprobs
        _require(top <= MAX_TOP_LOGPROBS, "prompt_logprobs", top, f"0 to {MAX_TOP_LOGPROBS}")


def _check_identity(request: inference_pb2.GenerateRequest) -> None:
    _check_bytes("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    _check_bytes("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    _check_bytes("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
    if abs(request.priority) > MAX_PRIORITY:
        permitted = f"-{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise invalid_value("priority", request.priority, permitted)


def _check_bytes(field: str, text: str, most: int) -> None:
    if text and (size := len(text.encode())) > most:
        raise invalid_value(field, f"{size} bytes", f"at most {most} bytes")


def _check_input(request: inference_pb2.GenerateRequest) -> None:
    match request.WhichOneof("input"):
        case None:
            raise invalid("input", "the request has no input; send token_ids, text or messages")
        case "token_ids":
            count = len(request.token_ids.ids)
            permitted = f"1 to {MAX_PROMPT_TOKENS} tokens"
            _require(1 <= count <= MAX_PROMPT_TOKENS, "prompt", f"{count} tokens", permitted)
        case "text":
            _require(bool(request.text), "prompt", "an empty text", "at least one character")
        case "messages":
            _check_messages(request.messages)
    most = request.truncate_prompt_tokens
    _require(most >= -1, "truncate_prompt_tokens", most, "-1, or a number of tokens")


def _check_messages(messages: inference_pb2.Messages) -> None:
    turns = messages.messages
    num_calls = 0
    if not 1 <= len(turns) <= MAX_MESSAGES:
        permitted = f"1 to {MAX_MESSAGES} messages"
        raise invalid_value("messages", f"a list of {len(turns)} messages", permitted)
    for message in turns:
        num_calls += len(message.tool_calls)
    check_calls(num_calls)
    for i, message in enumerate(turns):
        _check_message(i, message)


def check_calls(count: int) -> None:
    """Check the number of tool calls in a conversation.

    Raises:
        ServiceError: the conversation has too many tool calls.
    """
    if count > MAX_MESSAGES:
        permitted = f"at most {MAX_MESSAGES} calls"
        raise invalid_value("messages", f"a conversation with {count} calls", permitted)


def _check_message(index: int, message: inference_pb2.Message) -> None:
    role = message.role
    calls = len(message.tool_calls)
    if role not in ROLES:
        raise invalid_value(f"messages[{index}].role", role, ", ".join(ROLES))
    if calls and (role != "assistant" or calls > MAX_CALLS):
        permitted = f"at most {MAX_CALLS}, and those of an assistant"
        raise invalid_value(f"messages[{index}].tool_calls", f"{calls} calls of {role}", permitted)
    if role == "tool" and not (message.tool_call_id or message.name):
        permitted = "the id of the call that it answers"
        raise invalid_value(f"messages[{index}].tool_call_id", "missing", permitted)


def _check_sampling(sampling: inference_pb2.SamplingParams) -> None:
    if not sampling.ByteSize():
        return
    for name, allowed in SAMPLING_RANGES.items():
        if sampling.HasField(name):
            value = getattr(sampling, name)
            _require(value in allowed, name, float(f"{value:.7g}"), str(allowed))

    count = len(sampling.allowed_token_ids)
    permitted = f"at most {MAX_ALLOWED_TOKENS} tokens"
    _require(count <= MAX_ALLOWED_TOKENS, "allowed_token_ids", f"{count} tokens", permitted)
    count = len(sampling.bad_words)
    _require(count <= MAX_BAD_WORDS, "bad_words", f"{count} words", f"at most {MAX_BAD_WORDS}")
    for word in sampling.bad_words:
        size = len(word.encode())
        is_right = bool(word.strip()) and size <= MAX_BAD_WORD_BYTES
        permitted = f"words of at most {MAX_BAD_WORD_BYTES} bytes that are not blank"
        _require(is_right, "bad_words", f"a word of {size} bytes", permitted)
    count = len(sampling.logit_bias)
    permitted = f"at most {MAX_LOGIT_BIAS} tokens"
    _require(count <= MAX_LOGIT_BIAS, "logit_bias", f"{count} tokens", permitted)
    for token, value in sampling.logit_bias.items():
        field = f"logit_bias[{token}]"
        _require(value in LOGIT_BIAS, field, float(f"{value:.7g}"), str(LOGIT_BIAS))


def _check_stop(stop: inference_pb2.StopConditions) -> None:
    if stop.HasField("max_tokens"):
        most = stop.max_tokens
        _require(most >= 1, "max_tokens", most, "at least 1")
        if stop.min_tokens > most:
            raise invalid_value("min_tokens", stop.min_tokens, f"at most max_tokens, {most}")

    if (count := len(stop.stop_token_ids)) > MAX_STOP_TOKENS:
        permitted = f"at most {MAX_STOP_TOKENS} tokens"
        raise invalid_value("stop_token_ids", f"{count} tokens", permitted)
    if (count := len(stop.stop_strings)) > MAX_STOP_STRINGS:
        permitted = f"at most {MAX_STOP_STRINGS} strings"
        raise invalid_value("stop", f"{count} strings", permitted)

    for text in stop.stop_strings:
        size = len(text.encode())
        permitted = f"1 to {MAX_STOP_BYTES} bytes a string"
        _require(1 <= size <= MAX_STOP_BYTES, "stop", f"a string of {size} bytes", permitted)


def _check_reasoning(reasoning: inference_pb2.Reasoning) -> None:
    _check_bytes("reasoning.begin", reasoning.begin, MAX_STOP_BYTES)
    _check_bytes("reasoning.end", reasoning.end, MAX_STOP_BYTES)
    if reasoning.begin and not reasoning.end:
        raise invalid_value("reasoning.end", "empty", f"1 to {MAX_STOP_BYTES} bytes")


def _check_grammar(request: inference_pb2.GenerateRequest) -> None:
    """Check a grammar's size, and refuse options that cannot be combined with a grammar.

    The engine that compiles the grammar checks the rest.
    """
    if not request.HasField("grammar"):
        return
    size = request.grammar.ByteSize()
    permitted = f"at most {MAX_GRAMMAR_BYTES} bytes"
    _require(size <= MAX_GRAMMAR_BYTES, "grammar", f"{size} bytes", permitted)
    is_right = not request.stop.ignore_eos
    _require(is_right, "ignore_eos", True, "false with a grammar, which ends the answer")


def _check_samples(samples: inference_pb2.Samples) -> None:
    n = num_answers(samples)
    if not 1 <= n <= MAX_SAMPLES:
        raise invalid_value("n", n, f"1 to {MAX_SAMPLES}")
    if samples.HasField("best_of"):
        best_of = samples.best_of
        _require(n <= best_of <= MAX_SAMPLES, "best_of", best_of, f"{n} to {MAX_SAMPLES}")
        _require(not samples.HasField("beam"), "best_of", best_of, "unset in a beam search")


def _check_beam(request: inference_pb2.GenerateRequest) -> None:
    beam = request.samples.beam
    n = num_answers(request.samples)
    steering = {
        "grammar": request.HasField("grammar"),
        "logit_bias": bool(request.sampling.logit_bias),
        "allowed_token_ids": bool(request.sampling.allowed_token_ids),
        "bad_words": bool(request.sampling.bad_words),
        "min_tokens": bool(request.stop.min_tokens),
        "prompt_logprobs": request.output.HasField("prompt_logprobs"),
    }
    for field, is_given in steering.items():
        _require(not is_given, field, "set", "nothing in a beam search")

    permitted = f"1 to {MAX_BEAM_WIDTH}"
    _require(1 <= beam.width <= MAX_BEAM_WIDTH, "beam.width", beam.width, permitted)
    _require(n <= beam.width, "n", n, f"1 to {beam.width}, the width of the beam search")

    penalty = beam.length_penalty
    is_right = math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY
    permitted = f"-{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}"
    _require(is_right, "length_penalty", penalty, permitted)

    count = len(request.stop.stop_token_ids)
    permitted = f"at most {MAX_BEAM_STOP_TOKENS} in a beam search"
    _require(count <= MAX_BEAM_STOP_TOKENS, "stop_token_ids", f"{count} tokens", permitted)


def _check_continuation(request: inference_pb2.GenerateRequest) -> None:
    field = "continuation"
    answers = request.continuation.answers
    is_known = request.WhichOneof("input") == "token_ids"
    _require(is_known, field, "set", "nothing without token_ids")
    _require(is_growing(request), field, "set", "nothing in a search or with best_of above n")

    n = num_answers(request.samples)
    _require(len(answers) == n, f"{field}.answers", len(answers), f"{n}, one for each answer")
    _require(has_output(answers), field, "without a token", "left out until a token was received")
    most = request.stop.max_tokens
    _require(most > 0, "max_tokens", "unset", "what Accepted has, with a continuation")

    for i, answer in enumerate(answers):
        count = len(answer.token_ids)
        permitted = f"at most max_tokens, {most}"
        _require(count <= most, f"{field}.answers[{i}].token_ids", f"{count} tokens", permitted)

    fingerprints = request.continuation.fingerprints
    is_few = len(fingerprints) <= MAX_FINGERPRINTS
    permitted = f"at most {MAX_FINGERPRINTS}"
    _require(is_few, f"{field}.fingerprints", len(fingerprints), permitted)
    for each in fingerprints:
        _check_bytes(f"{field}.fingerprints", each, MAX_FINGERPRINT_BYTES)


def _check_embedding(request: inference_pb2.GenerateRequest) -> None:
    for field in ("messages", "sampling", "stop", "output", "samples", "grammar", "continuation"):
        _require(not request.HasField(field), field, "set", "nothing with embed")


def check_task(request: inference_pb2.GenerateRequest, task: inference_pb2.Task, name: str) -> None:
    """Check that the model serves the request's task: generation or embedding.

    Args:
        task: the model's task.
        name: the model's name, for error messages.

    Raises:
        ServiceError: the model has another task.
    """
    is_for_embeddings = task == inference_pb2.TASK_EMBED
    if request.embed and not is_for_embeddings:
        message = f"model {name!r} generates text; ask a model for embeddings, or generate with it"
        raise invalid("model", message, "WRONG_TASK")
    if is_for_embeddings and not request.embed:
        message = (
            f"model {name!r} is for embeddings; ask for them (POST /v1/embeddings, embed over "
            "gRPC), or ask a model that generates"
        )
        raise invalid("model", message, "WRONG_TASK")


def is_growing(request: inference_pb2.GenerateRequest) -> bool:
    """Return whether answers are streamed token by token, rather than returned only at the end."""
    if request.embed:
        return False
    if not request.HasField("samples"):
        return True
    samples = request.samples
    return not samples.HasField("beam") and samples.best_of <= num_answers(samples)


class _PartialAnswer(Protocol):
    """Protocol for a partial answer: a protobuf message, or an answer kept by a `Progress`."""

    @property
    def token_ids(self) -> Collection[int]: ...

    @property
    def reason(self) -> inference_pb2.FinishReason: ...


def has_output(answers: Iterable[_PartialAnswer]) -> bool:
    """Return whether any answer has a token or has ended, so that there is output to continue."""
    return any(answer.token_ids or answer.reason for answer in answers)


def num_answers(samples: inference_pb2.Samples) -> int:
    """Return the number of answers that a request asks for (1 by default)."""
    return samples.n if samples.HasField("n") else 1


def check_prompt_tokens(token_ids: Collection[int], vocab_size: int, field: str = "prompt") -> None:
    """Check the token ids of a prompt.

    Raises:
        ServiceError: the prompt is empty, or a token is not in the vocabulary.
    """
    _require(bool(token_ids), field, "no token", "at least one token")
    check_vocabulary(field, token_ids, vocab_size)


def check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that all tokens are in the vocabulary.

    Raises:
        ServiceError: a token is not in the vocabulary.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise invalid_value(field, f"token {largest}", f"tokens below {vocab_size}")


def _require(is_right: bool, field: str, value: object, permitted: str) -> None:
    if not is_right:
        raise invalid_value(field, value, permitted)


def invalid_value(field: str, value: object, permitted: str) -> ServiceError:
    """Return an INVALID_ARGUMENT error with the field, its value and the permitted values."""
    shown = value if isinstance(value, str) else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return invalid(field, f"{field} is {shown}; possible: {permitted}")
