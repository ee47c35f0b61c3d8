"""The answers to prompts, with the fields of vLLM's outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ullage.inference.v1 import inference_pb2

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
"""Why whole answers end. Answers with another reason are incomplete."""
NO_END = "its stream ended early"


@dataclass
class Logprob:
    """The log-probability of a token at one position."""

    logprob: float
    rank: int | None = None
    """Rank of the token, from 1 (None if it is not among the tokens that were asked for)."""
    decoded_token: str | None = None


@dataclass
class ToolCall:
    """A call of a function that the model makes."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    """Text of a JSON object."""


@dataclass
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities (None unless logprobs were asked for)."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities by token id, for each token (None unless they were asked for)."""
    finish_reason: str | None = None
    """stop, length, or tool_calls."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the answer, if one did."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of functions, which are not in the text."""
    lora_request: None = None

    def finished(self) -> bool:
        """Return whether the answer is complete, which it always is here."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All answers to a prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt (None if it was given as token ids)."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities by token id, for each token of the prompt, and None for the first one. The
    list is None unless they were asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused."""
    lora_request: None = None
    degraded: list[str] = field(default_factory=list)
    """Limits that the service lowered, such as `max_tokens=64`. Empty unless spec allows that."""


class IncompleteAnswer(Exception):
    """Raised if an answer was cut off: by a time limit, a lost engine, or the end of a router.

    The message says why.
    """


def read_answer(
    request: inference_pb2.GenerateRequest,
    responses: Sequence[inference_pb2.GenerateResponse],
    prompt: str | None,
) -> RequestOutput:
    """Return the answers in the responses to a request.

    Args:
        request: the request.
        responses: all of its responses, in order.
        prompt: text of the prompt, or None if it was given as token ids.

    Raises:
        IncompleteAnswer: an answer did not come to its end.
    """
    if not responses:
        raise IncompleteAnswer(NO_END)
    accepted = responses[0].accepted
    outputs = [CompletionOutput(index) for index in range(request.samples.n or 1)]
    cached_tokens = 0
    cut = NO_END
    scored: list[inference_pb2.TokenLogprob] = []
    for response in responses:
        match response.WhichOneof("event"):
            case "delta":
                scored += response.delta.prompt_logprobs.tokens
                _add(outputs[response.delta.sample], response.delta, request)
            case "sample_finished":
                ended = response.sample_finished
                _end(outputs[ended.sample], ended.reason, ended.stop_string, request)
            case "finished":
                cached_tokens = response.finished.usage.cached_tokens
                cut = _cut_reason(response.finished)
                if len(outputs) == 1:
                    reason = response.finished.reason
                    _end(outputs[0], reason, response.finished.stop_string, request)

    if any(output.finish_reason is None for output in outputs):
        raise IncompleteAnswer(cut)
    return RequestOutput(
        request_id=accepted.request_id,
        prompt=prompt,
        prompt_token_ids=list(accepted.prompt_token_ids),
        outputs=outputs,
        prompt_logprobs=_prompt_logprobs(scored, request),
        num_cached_tokens=cached_tokens,
        degraded=list(accepted.degraded),
    )


def _cut_reason(finished: inference_pb2.Finished) -> str:
    """Return why an answer is incomplete, if it is."""
    if finished.reason != inference_pb2.FINISH_REASON_TIMEOUT:
        return "the service cancelled it"
    # Routers name the loss of an engine in this field.
    if finished.stop_string:
        return f"{finished.stop_string}: its engine was lost, and no other one continued it"
    return "a time limit ended it; set a longer spec limits.requestTimeout or a lower max_tokens"


def _add(
    output: CompletionOutput, delta: inference_pb2.Delta, request: inference_pb2.GenerateRequest
) -> None:
    output.text += delta.text
    output.token_ids += delta.token_ids
    for piece in delta.tool_calls:
        while len(output.tool_calls) <= piece.index:
            output.tool_calls.append(ToolCall())
        call = output.tool_calls[piece.index]
        call.id += piece.id
        call.name += piece.name
        call.arguments += piece.arguments

    if request.output.HasField("top_logprobs"):
        output.logprobs = output.logprobs or []
        output.logprobs += [_logprobs(entry) for entry in delta.logprobs]
        so_far = output.cumulative_logprob or 0.0
        output.cumulative_logprob = so_far + sum(entry.logprob for entry in delta.logprobs)


def _logprobs(entry: inference_pb2.TokenLogprob) -> dict[int, Logprob]:
    """Return the log-probabilities at a position, the chosen token first as in vLLM."""
    top = {
        each.token_id: Logprob(each.logprob, rank, each.token)
        for rank, each in enumerate(entry.top, start=1)
    }
    chosen = top.pop(entry.token_id, Logprob(entry.logprob, entry.rank or None, entry.token))
    return {entry.token_id: chosen, **top}


def _prompt_logprobs(
    scored: Sequence[inference_pb2.TokenLogprob], request: inference_pb2.GenerateRequest
) -> list[dict[int, Logprob] | None] | None:
    """Return the log-probabilities of a prompt's tokens. The first token has none."""
    if not request.output.HasField("prompt_logprobs"):
        return None
    return [None, *(_logprobs(entry) for entry in scored[1:])]


def _end(
    output: CompletionOutput,
    reason: inference_pb2.FinishReason,
    stop_string: str,
    request: inference_pb2.GenerateRequest,
) -> None:
    output.finish_reason = _REASONS.get(reason)
    last = output.token_ids[-1] if output.token_ids else None
    if stop_string:
        output.stop_reason = stop_string
    elif output.finish_reason == "stop" and last in request.stop.stop_token_ids:
        output.stop_reason = last
