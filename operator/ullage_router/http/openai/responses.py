"""The bodies of OpenAI's chat and completion responses, complete or as the chunks of a stream.

`finish_reason` has OpenAI's values. `stop_reason`, which comes from vLLM, gives the cause:

    a stop string         "stop"      the string
    a lowered limit       "length"    the limit as in the header x-ullage-degraded: "max_tokens=64"
    a time limit          "length"    "timeout"
    an engine was lost    "length"    ENGINE_LOST or ENGINE_SILENT, if no engine could resume the
                                      answer in time

An engine that resumes another engine's answer may produce different text. In that case, a stream
has a comment at its end and a field in the usage chunk, and a complete response has the header
x-ullage-resumed-inexact.
"""

import codecs
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.openai.custom_tools import InputReader, as_input
from ullage_router.telemetry.record import DEVICE, add_cached, cached_tokens

JSON = dict[str, object]
Delta = inference_pb2.Delta
Finished = inference_pb2.Finished
SampleFinished = inference_pb2.SampleFinished
Accepted = inference_pb2.Accepted
TokenLogprob = inference_pb2.TokenLogprob
ToolCallPiece = inference_pb2.ToolCallPiece
_encode = msgspec.json.Encoder().encode
_FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TIMEOUT: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class ResponseOptions(msgspec.Struct, frozen=True):
    """Settings that determine which optional fields a response has, and some of their values."""

    id: str
    model: str
    created: int
    """Time of the response's creation, in Unix seconds."""
    logprobs: bool
    token_ids: bool
    usage: bool
    """Whether the stream ends with a usage chunk. Complete responses always include the usage."""
    n: int
    """Number of choices in the response."""
    tools: bool = False
    """Whether the answer may have tool calls instead of text."""
    tokens_as_ids: bool = False
    """Whether logprobs name tokens as `token_id:5` instead of by their text."""
    continuous_usage: bool = False
    """Whether every chunk of a stream has the usage so far."""
    prompt_logprobs: int | None = None
    """Number of alternatives in the field `prompt_logprobs`, or None to leave the field out."""
    echo_logprobs: int | None = None
    """Number of alternatives of echoed tokens, or None if the echo has no log-probabilities."""
    is_echo_only: bool = False
    """Whether the answer is the echoed prompt alone, without the token generated behind it."""
    hides_reasoning: bool = False
    """Whether the model's reasoning is left out."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools whose input is text instead of JSON."""
    samples: int = 1
    """Number of choices of each prompt."""
    lowered_limit: str = ""
    """The lowered output limit, such as `max_tokens=64` (empty if it was not lowered)."""


@dataclass(slots=True)
class Collected:
    """The deltas of one choice, collected for a complete response."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallPiece] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The prompt's tokens. Only the first choice of a prompt has them."""
    end: SampleFinished | None = None
    """The event that ended this choice, or None if it ended together with the response."""

    def add(self, delta: Delta) -> None:
        """Append a delta to the choice."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.HasField("prompt_logprobs"):
            self.prompt_logprobs.extend(delta.prompt_logprobs.tokens)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._add_call(piece)

    def _add_call(self, piece: ToolCallPiece) -> None:
        if piece.name:
            copy = ToolCallPiece()
            copy.CopyFrom(piece)  # other clients may share the event
            self.calls.append(copy)
        else:
            self.calls[-1].arguments += piece.arguments


class Format(Protocol):
    """Converts an answer to one endpoint's response bodies, complete or as chunks of a stream."""

    def opening(self, accepted: Accepted) -> list[JSON]:
        """Return the chunks that precede the first text."""

    def piece(self, delta: Delta) -> list[JSON]:
        """Return the chunk for a delta, or no chunks if the delta is empty."""

    def ended(self, end: SampleFinished) -> list[JSON]:
        """Return the final chunk of a choice that ends before the response does."""

    def closing(self, finished: Finished) -> list[JSON]:
        """Return the final chunks: one for each choice that has not ended, and the usage chunk."""

    def whole(self, accepted: Accepted, parts: Sequence[Collected], finished: Finished) -> JSON:
        """Return the body of a complete response."""


class ChatFormat:
    """Formats responses of /v1/chat/completions, complete (`chat.completion`) or in chunks."""

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._open = list(range(options.n))
        self._counted = _UsageSoFar()
        self._inputs: dict[int, tuple[int, InputReader]] = {}
        """Index and input of the open call of a custom tool, by choice."""

    def opening(self, accepted: Accepted) -> list[JSON]:
        self._counted.begin(accepted)
        first = {"role": "assistant", "content": None if self._options.tools else ""}
        chunks = [self._chunk(i, dict(first)) for i in self._open]
        if self._options.token_ids:
            chunks[0]["prompt_token_ids"] = list(accepted.prompt_token_ids)
        return chunks

    def piece(self, delta: Delta) -> list[JSON]:
        self._counted.add(delta)
        if not _says_something(delta):
            return []
        more: JSON = {}
        if self._options.logprobs:
            more["logprobs"] = chat_logprobs(delta.logprobs, self._options.tokens_as_ids)
            # The token that ends a turn has no entry, so its chunk would be empty.
            is_end = all(entry.is_end for entry in delta.logprobs)
            says_more = delta.text or delta.tool_calls or delta.reasoning
            if is_end and not (says_more or self._options.token_ids):
                return []
        if self._options.token_ids:
            more["token_ids"] = list(delta.token_ids)
        calls = self._call_pieces(delta)
        if delta.tool_calls and not (calls or delta.text or delta.reasoning or more):
            return []  # arguments that add nothing to the input of a custom tool
        return [self._chunk(delta.sample, _chat_delta(delta, calls), more)]

    def _call_pieces(self, delta: Delta) -> list[JSON]:
        """Return the fragments of a delta's calls, with input instead of a custom tool's JSON."""
        if not self._options.custom_tools:
            return [_tool_call_piece(piece) for piece in delta.tool_calls]

        fragments: list[JSON] = []
        for piece in delta.tool_calls:
            if piece.name:
                fragments += self._end_input(delta.sample)
            if piece.name in self._options.custom_tools:
                reader = InputReader()
                self._inputs[delta.sample] = (piece.index, reader)
                custom = {"name": piece.name, "input": reader.push(piece.arguments)}
                start: JSON = {"index": piece.index, "id": piece.id, "type": "custom"}
                fragments.append(start | {"custom": custom})
            elif delta.sample not in self._inputs:
                fragments.append(_tool_call_piece(piece))
            elif text := self._inputs[delta.sample][1].push(piece.arguments):
                fragments.append({"index": piece.index, "custom": {"input": text}})
        return fragments

    def _end_input(self, choice: int) -> list[JSON]:
        """Return the last fragment of a custom tool's open call, if it has one."""
        if choice not in self._inputs:
            return []
        index, reader = self._inputs.pop(choice)
        text = reader.close()
        return [{"index": index, "custom": {"input": text}}] if text else []

    def _last(self, choice: int, end: Finished | SampleFinished) -> list[JSON]:
        """Return the last chunks of a choice."""
        rest = self._end_input(choice)
        chunks = [self._chunk(choice, {"tool_calls": rest})] if rest else []
        return [*chunks, self._chunk(choice, {}, _ending(end, self._options))]

    def ended(self, end: SampleFinished) -> list[JSON]:
        self._open.remove(end.sample)
        return self._last(end.sample, end)

    def closing(self, finished: Finished) -> list[JSON]:
        last = [chunk for i in self._open for chunk in self._last(i, finished)]
        return [*last, *_usage_chunk(self._base(), self._options, finished)]

    def whole(self, accepted: Accepted, parts: Sequence[Collected], finished: Finished) -> JSON:
        choices = [self._choice(i, part, finished) for i, part in enumerate(parts)]
        answer = self._base() | {"object": "chat.completion", "choices": choices}
        answer["usage"] = usage(finished.usage)
        if self._options.prompt_logprobs is not None:
            entries = parts[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._options.prompt_logprobs)
        if self._options.token_ids:
            answer["prompt_token_ids"] = list(accepted.prompt_token_ids)
        return answer

    def _choice(self, index: int, part: Collected, finished: Finished) -> JSON:
        choice: JSON = {
            "index": index,
            "message": _chat_message(part, self._options.custom_tools),
            "logprobs": chat_logprobs(part.logprobs, self._options.tokens_as_ids)
            if self._options.logprobs
            else None,
            **_ending(part.end or finished, self._options),
        }
        return choice | {"token_ids": part.token_ids} if self._options.token_ids else choice

    def _chunk(self, index: int, delta: JSON, more: JSON | None = None) -> JSON:
        choice: JSON = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._base() | {"choices": [choice | (more or {})]}
        return chunk | self._counted.field(self._options)

    def _base(self) -> JSON:
        return _base("chatcmpl-", "chat.completion.chunk", self._options)


class CompletionFormat:
    """Formats responses of /v1/completions (`text_completion`), complete or in chunks.

    A request with several prompts has the choices of each prompt one after another.
    """

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._open = list(range(options.n))
        self._offsets = [_TextOffset() for _ in range(options.n)]
        """The place of each choice's next token."""
        self._prompt_ids: dict[int, list[int]] = {}
        """Prompt token ids that have yet to be sent, by choice."""
        self._counted = _UsageSoFar()

    def opening(self, accepted: Accepted) -> list[JSON]:
        self.begin(accepted, self._open)
        return []

    def begin(self, accepted: Accepted, choices: Iterable[int]) -> None:
        """Take note of a prompt and the choices that belong to it."""
        self._counted.begin(accepted)
        if self._options.token_ids:
            self._prompt_ids |= {i: list(accepted.prompt_token_ids) for i in choices}

    def piece(self, delta: Delta) -> list[JSON]:
        self._counted.add(delta)
        if delta.HasField("prompt_logprobs"):
            return self._prompt_pieces(delta)
        if not _says_something(delta):
            return []
        index = delta.sample
        more: JSON = {}
        if self._options.logprobs:
            logprobs = _CompletionLogprobs(self._options.tokens_as_ids, self._offsets[index])
            logprobs.add(delta.logprobs)
            more["logprobs"] = logprobs.as_json()
        if self._options.token_ids:
            more["token_ids"] = list(delta.token_ids)
            more["prompt_token_ids"] = self._prompt_ids.pop(index, None)
        return [self._chunk(index, delta.text, more)]

    def _prompt_pieces(self, delta: Delta) -> list[JSON]:
        """Return chunks with the log-probabilities of echoed tokens, whose text was sent before."""
        if self._options.echo_logprobs is None:
            return []
        scored = delta.prompt_logprobs
        offset = self._offsets[delta.sample]
        logprobs = _CompletionLogprobs(self._options.tokens_as_ids, offset)
        logprobs.add_prompt(scored.tokens, scored.start, self._options.echo_logprobs)

        choices = range(delta.sample, delta.sample + self._options.samples)
        for choice in choices[1:]:
            self._offsets[choice] = copy.deepcopy(offset)
        return [self._chunk(choice, "", {"logprobs": logprobs.as_json()}) for choice in choices]

    def ended(self, end: SampleFinished) -> list[JSON]:
        self._open.remove(end.sample)
        return [self._chunk(end.sample, "", _ending(end, self._options))]

    def closing(self, finished: Finished) -> list[JSON]:
        last = [self._chunk(i, "", _ending(finished, self._options)) for i in self._open]
        return [*last, *_usage_chunk(self._base(), self._options, finished)]

    def whole(self, accepted: Accepted, parts: Sequence[Collected], finished: Finished) -> JSON:
        if not self._prompt_ids:
            self.begin(accepted, range(len(parts)))
        samples = self._options.samples
        prompts = [parts[i - i % samples].prompt_logprobs for i in range(len(parts))]
        choices = [
            self._choice(i, part, prompt, finished)
            for i, (part, prompt) in enumerate(zip(parts, prompts, strict=True))
        ]
        for i, prompt_ids in self._prompt_ids.items():
            choices[i]["prompt_token_ids"] = prompt_ids
        return self._base() | {"choices": choices, "usage": usage(finished.usage)}

    def _choice(
        self, index: int, part: Collected, prompt: Sequence[TokenLogprob], finished: Finished
    ) -> JSON:
        choice: JSON = {
            "index": index,
            "text": "".join(part.texts),
            "logprobs": self._logprobs(part, prompt) if self._options.logprobs else None,
            **_ending(part.end or finished, self._options),
        }
        if self._options.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, self._options.prompt_logprobs)
        return choice | {"token_ids": part.token_ids} if self._options.token_ids else choice

    def _logprobs(self, part: Collected, prompt: Sequence[TokenLogprob]) -> JSON:
        logprobs = _CompletionLogprobs(self._options.tokens_as_ids, _TextOffset())
        if self._options.echo_logprobs is not None:
            logprobs.add_prompt(prompt, 0, self._options.echo_logprobs)
        logprobs.add(part.logprobs)
        return logprobs.as_json()

    def _chunk(self, index: int, text: str, more: JSON) -> JSON:
        choice: JSON = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        chunk = self._base() | {"choices": [choice | more]}
        return chunk | self._counted.field(self._options)

    def _base(self) -> JSON:
        return _base("cmpl-", "text_completion", self._options)


class _UsageSoFar:
    """Counts the tokens of a stream, for chunks with continuous usage."""

    def __init__(self) -> None:
        self._counted = inference_pb2.Usage()

    def begin(self, accepted: Accepted) -> None:
        """Add a prompt's tokens."""
        self._counted.prompt_tokens += accepted.prompt_tokens
        add_cached(self._counted, accepted)

    def add(self, delta: Delta) -> None:
        """Add a delta's tokens."""
        self._counted.completion_tokens += delta.num_tokens

    def field(self, options: ResponseOptions) -> JSON:
        """Return a chunk's usage: so far, null if it comes only at the end, or absent."""
        if options.continuous_usage:
            return {"usage": usage(self._counted)}
        return {"usage": None} if options.usage else {}


def usage(counted: inference_pb2.Usage) -> JSON:
    """Return a request's token counts as OpenAI's usage object."""
    counts: JSON = {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": prompt_tokens_details(
            {each.tier: each.num_tokens for each in cached_tokens(counted)}
        ),
    }
    if counted.reasoning_tokens:
        details = {"reasoning_tokens": counted.reasoning_tokens}
        counts["completion_tokens_details"] = details
    return counts


def prompt_tokens_details(cached: Mapping[str, int]) -> JSON:
    """Return OpenAI's `prompt_tokens_details` object.

    The object lists the cache tiers if any tier but the device had cached KV.

    Args:
        cached: Number of prompt tokens whose KV was reused, by cache tier.
    """
    details: JSON = {"cached_tokens": sum(cached.values())}
    if any(tier != DEVICE for tier in cached):
        details["cached_tokens_details"] = dict(cached)
    return details


def chat_logprobs(entries: Sequence[TokenLogprob], as_ids: bool = False) -> JSON:
    """Return the logprobs object of a chat response.

    The object covers the content's tokens, but not the token that ends the turn.

    Args:
        entries: The tokens.
        as_ids: Whether tokens are named by their ids.
    """
    return {"content": [chat_logprob(entry, as_ids) for entry in entries if not entry.is_end]}


def chat_logprob(entry: TokenLogprob, as_ids: bool = False) -> msgspec.Raw:
    """Return the JSON of a token with its alternatives.

    An answer has up to a million of these objects. As JSON, they take a fifth of the memory, and
    another encoding only copies their bytes.

    Args:
        entry: The token.
        as_ids: Whether tokens are named by their ids.
    """
    top = [_logprob(other, as_ids) for other in entry.top]
    return msgspec.Raw(_encode(_logprob(entry, as_ids) | {"top_logprobs": top}))


class _TextOffset:
    """The place in a text at which its next token begins.

    The tokens' bytes tell the place, since the text of a token may come later than the token: it
    may be a part of a character, or the beginning of a stop string.
    """

    def __init__(self) -> None:
        self.characters = 0
        """Number of whole characters before the next token."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entry: TokenLogprob) -> None:
        """Move on behind a token."""
        self.characters += len(self._decoder.decode(_bytes_of(entry)))


class _CompletionLogprobs:
    """Collects the logprobs object of a completion. `top_logprobs` always has the chosen token.

    Args:
        as_ids: Whether tokens are named by their ids.
        offset: The place of the first token, which moves on with the tokens.
    """

    def __init__(self, as_ids: bool, offset: _TextOffset) -> None:
        self._as_ids = as_ids
        self._offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[msgspec.Raw | None] = []
        self._offsets: list[int] = []

    def add(self, entries: Sequence[TokenLogprob], num_top: int | None = None) -> None:
        """Add tokens with at most `num_top` alternatives, or with all of them."""
        for entry in entries:
            name = self._add_token(entry)
            # Tokens may have the same text. The likeliest of them counts.
            top: dict[str, float] = {}
            for other in entry.top[:num_top]:
                top.setdefault(_named(other, self._as_ids), other.logprob)
            top.setdefault(name, entry.logprob)
            self._logprobs.append(entry.logprob)
            self._top.append(msgspec.Raw(_encode(top)))  # as for chats

    def add_prompt(self, entries: Sequence[TokenLogprob], start: int, num_top: int) -> None:
        """Add tokens of the prompt from position `start` on. The prompt's first has no logprob."""
        if start == 0 and entries:
            self._add_token(entries[0])
            self._logprobs.append(None)
            self._top.append(None)
            entries = entries[1:]
        self.add(entries, num_top)

    def as_json(self) -> JSON:
        """Return the logprobs object."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }

    def _add_token(self, entry: TokenLogprob) -> str:
        name = _named(entry, self._as_ids)
        self._tokens.append(name)
        self._offsets.append(self._offset.characters)
        self._offset.add(entry)
        return name


def prompt_logprobs(entries: Sequence[TokenLogprob], num_top: int) -> list[JSON | None]:
    """Return vLLM's `prompt_logprobs`: an object by token ids for each token, null for the first.

    Args:
        entries: All tokens of the prompt.
        num_top: Number of alternatives in addition to the prompt's own token.
    """
    positions: list[JSON | None] = [None]
    for entry in entries[1:]:
        by_id = {str(entry.token_id): _ranked(entry, entry.rank)}
        for rank, other in enumerate(entry.top[:num_top], start=1):
            by_id.setdefault(str(other.token_id), _ranked(other, rank))
        positions.append(dict(by_id))
    return positions


def _ranked(entry: TokenLogprob | inference_pb2.Alternative, rank: int) -> JSON:
    return {"logprob": entry.logprob, "rank": rank, "decoded_token": entry.token}


def _named(entry: TokenLogprob | inference_pb2.Alternative, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.token


def _logprob(entry: TokenLogprob | inference_pb2.Alternative, as_ids: bool) -> JSON:
    return {
        "token": _named(entry, as_ids),
        "logprob": entry.logprob,
        "bytes": list(_bytes_of(entry)),
    }


def _bytes_of(entry: TokenLogprob | inference_pb2.Alternative) -> bytes:
    return entry.token_bytes or entry.token.encode()


def _chat_message(part: Collected, custom_tools: frozenset[str]) -> JSON:
    """Return the assistant's message, with null content if there are tool calls and no text."""
    content = "".join(part.texts)
    message: JSON = {"role": "assistant", "content": content or (None if part.calls else "")}
    if part.reasoning:
        message |= _reasoning("".join(part.reasoning))
    if part.calls:
        message["tool_calls"] = [
            _custom_call(call) if call.name in custom_tools else _tool_call(call)
            for call in part.calls
        ]
    return message


def _chat_delta(delta: Delta, calls: list[JSON]) -> JSON:
    message: JSON = {}
    if delta.reasoning:
        message |= _reasoning(delta.reasoning)
    if calls:
        message["tool_calls"] = calls
    return message | {"content": delta.text} if delta.text or not message else message


def _reasoning(text: str) -> JSON:
    """Return the reasoning under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _tool_call(call: ToolCallPiece) -> JSON:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _custom_call(call: ToolCallPiece) -> JSON:
    custom = {"name": call.name, "input": as_input(call.arguments)}
    return {"id": call.id, "type": "custom", "custom": custom}


def _tool_call_piece(piece: ToolCallPiece) -> JSON:
    """Return a fragment of a tool call. Only the first one has the id, the type and the name."""
    if piece.name:
        return {"index": piece.index} | _tool_call(piece)
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def _says_something(delta: Delta) -> bool:
    return bool(
        delta.text or delta.token_ids or delta.logprobs or delta.tool_calls or delta.reasoning
    )


def _ending(end: Finished | SampleFinished, options: ResponseOptions) -> JSON:
    stop_reason = end.stop_string
    if end.reason == inference_pb2.FINISH_REASON_TIMEOUT:
        stop_reason = end.stop_string or "timeout"
    elif end.reason == inference_pb2.FINISH_REASON_LENGTH:
        stop_reason = options.lowered_limit or end.stop_string
    return {"finish_reason": _FINISH[end.reason], "stop_reason": stop_reason or None}


def _usage_chunk(base: JSON, options: ResponseOptions, finished: Finished) -> list[JSON]:
    if not options.usage:
        return []
    chunk = base | {"choices": [], "usage": usage(finished.usage)}
    if finished.resumed_inexact:
        chunk["ullage"] = {"resumed_inexact": True, "resumed_on": list(finished.resumed_on)}
    return [chunk]


def _base(prefix: str, kind: str, options: ResponseOptions) -> JSON:
    return {
        "id": prefix + options.id,
        "object": kind,
        "created": options.created,
        "model": options.model,
    }
