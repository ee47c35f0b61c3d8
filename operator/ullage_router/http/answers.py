"""The bodies of OpenAI's answers: chunks of a stream and whole answers, chat and completions.

finish_reason has OpenAI's words; an answer that the time limit ended says "length", and stop_reason
(a field that vLLM has too) says "timeout". Where a stop string ended it, stop_reason is that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ullage.inference.v1 import inference_pb2

JSON = dict[str, object]
Delta = inference_pb2.Delta
Finished = inference_pb2.Finished
Accepted = inference_pb2.Accepted
TokenLogprob = inference_pb2.TokenLogprob

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TIMEOUT: "length",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the answer carries besides text."""

    id: str
    model: str
    created: int
    """Unix time, seconds."""
    logprobs: bool
    token_ids: bool
    usage: bool
    """A last chunk with the usage; whole answers always have it."""


@dataclass(slots=True)
class Collected:
    """The deltas of a whole answer."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


class Format(Protocol):
    """How one endpoint says things."""

    def opening(self, accepted: Accepted) -> list[JSON]:
        """Chunks before the first text."""

    def piece(self, delta: Delta) -> JSON | None:
        """The chunk of a delta; None when it would say nothing."""

    def closing(self, finished: Finished) -> list[JSON]:
        """Chunks after the last text."""

    def whole(self, accepted: Accepted, parts: Collected, finished: Finished) -> JSON:
        """The answer in one piece."""


class ChatFormat:
    """chat.completion and its chunks."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def opening(self, accepted: Accepted) -> list[JSON]:
        chunk = self._chunk({"role": "assistant", "content": ""})
        if self._wanted.token_ids:
            chunk["prompt_token_ids"] = list(accepted.prompt_token_ids)
        return [chunk]

    def piece(self, delta: Delta) -> JSON | None:
        if not _says_something(delta):
            return None
        more: JSON = {}
        if self._wanted.logprobs:
            more["logprobs"] = chat_logprobs(delta.logprobs)
        if self._wanted.token_ids:
            more["token_ids"] = list(delta.token_ids)
        return self._chunk({"content": delta.text}, more)

    def closing(self, finished: Finished) -> list[JSON]:
        last = self._chunk({}, _ending(finished))
        return [last, *_usage_chunk(self._base(), self._wanted, finished)]

    def whole(self, accepted: Accepted, parts: Collected, finished: Finished) -> JSON:
        choice: JSON = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(parts.texts)},
            "logprobs": chat_logprobs(parts.logprobs) if self._wanted.logprobs else None,
            **_ending(finished),
        }
        answer = self._base() | {"object": "chat.completion", "choices": [choice]}
        answer["usage"] = usage(finished.usage)
        if self._wanted.token_ids:
            choice["token_ids"] = parts.token_ids
            answer["prompt_token_ids"] = list(accepted.prompt_token_ids)
        return answer

    def _chunk(self, delta: JSON, more: JSON | None = None) -> JSON:
        choice: JSON = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._base() | {"choices": [choice | (more or {})]}
        return chunk | {"usage": None} if self._wanted.usage else chunk

    def _base(self) -> JSON:
        return _base("chatcmpl-", "chat.completion.chunk", self._wanted)


class CompletionFormat:
    """text_completion, whole and in chunks."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._offset = 0
        self._prompt_ids: list[int] | None = None

    def opening(self, accepted: Accepted) -> list[JSON]:
        if self._wanted.token_ids:
            self._prompt_ids = list(accepted.prompt_token_ids)
        return []

    def piece(self, delta: Delta) -> JSON | None:
        if not _says_something(delta):
            return None
        more: JSON = {}
        if self._wanted.logprobs:
            more["logprobs"] = completion_logprobs(delta.logprobs, self._offset)
        if self._wanted.token_ids:
            more["token_ids"] = list(delta.token_ids)
            more["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        self._offset += len(delta.text)
        return self._chunk(delta.text, more)

    def closing(self, finished: Finished) -> list[JSON]:
        last = self._chunk("", _ending(finished))
        return [last, *_usage_chunk(self._base(), self._wanted, finished)]

    def whole(self, accepted: Accepted, parts: Collected, finished: Finished) -> JSON:
        choice: JSON = {
            "index": 0,
            "text": "".join(parts.texts),
            "logprobs": completion_logprobs(parts.logprobs, 0) if self._wanted.logprobs else None,
            **_ending(finished),
        }
        if self._wanted.token_ids:
            choice["token_ids"] = parts.token_ids
            choice["prompt_token_ids"] = list(accepted.prompt_token_ids)
        return self._base() | {"choices": [choice], "usage": usage(finished.usage)}

    def _chunk(self, text: str, more: JSON) -> JSON:
        choice: JSON = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        chunk = self._base() | {"choices": [choice | more]}
        return chunk | {"usage": None} if self._wanted.usage else chunk

    def _base(self) -> JSON:
        return _base("cmpl-", "text_completion", self._wanted)


def usage(counted: inference_pb2.Usage) -> JSON:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
    }


def chat_logprobs(entries: Sequence[TokenLogprob]) -> JSON:
    """The logprobs object of chat answers."""
    return {
        "content": [
            _logprob(entry) | {"top_logprobs": [_logprob(top) for top in entry.top]}
            for entry in entries
        ]
    }


def completion_logprobs(entries: Sequence[TokenLogprob], offset: int) -> JSON:
    """The logprobs object of completions; the chosen token is always among the likeliest.

    Args:
        offset: characters of the answer before the first entry.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {entry.token: entry.logprob} | {top.token: top.logprob for top in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _logprob(entry: TokenLogprob | inference_pb2.Alternative) -> JSON:
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.token_bytes or entry.token.encode()),
    }


def _says_something(delta: Delta) -> bool:
    return bool(delta.text or delta.token_ids or delta.logprobs)


def _ending(finished: Finished) -> JSON:
    is_timeout = finished.reason == inference_pb2.FINISH_REASON_TIMEOUT
    return {
        "finish_reason": _FINISH[finished.reason],
        "stop_reason": "timeout" if is_timeout else finished.stop_string or None,
    }


def _usage_chunk(base: JSON, wanted: Wanted, finished: Finished) -> list[JSON]:
    return [base | {"choices": [], "usage": usage(finished.usage)}] if wanted.usage else []


def _base(prefix: str, kind: str, wanted: Wanted) -> JSON:
    return {
        "id": prefix + wanted.id,
        "object": kind,
        "created": wanted.created,
        "model": wanted.model,
    }
