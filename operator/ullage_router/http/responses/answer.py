"""Writes an answer as the items of the Responses API, with the events of its stream.

An answer consists of reasoning, a message and function calls, in any order that the model chooses.
Each is an item that opens, grows and closes before the next one opens.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.http.openai.custom_tools import InputReader, as_arguments
from ullage_router.http.openai.errors import DONE, error_code, in_api_words, sse_event
from ullage_router.http.openai.responses import (
    JSON,
    ResponseOptions,
    chat_logprob,
    prompt_tokens_details,
)
from ullage_router.http.responses.errors import NAMES
from ullage_router.telemetry.record import cached_tokens

_encode = msgspec.json.Encoder().encode
_COMPLETE = frozenset({inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_TOOL_CALLS})


class _Call(NamedTuple):
    """The words of the API for a type of calls."""

    prefix: str
    """Beginning of items' ids."""
    event: str
    """Beginning of the names of events."""
    field: str
    """The field of arguments or input."""


_CALLS = {
    "function_call": _Call("fc", "response.function_call_arguments", "arguments"),
    "custom_tool_call": _Call("ctc", "response.custom_tool_call_input", "input"),
}
_PREFIXES = {"reasoning": "rs", "message": "msg"}


@dataclass(slots=True)
class _OpenItem:
    """An item of the answer, while the model writes it."""

    kind: str
    """`reasoning`, `message`, `function_call` or `custom_tool_call`."""
    id: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    """The function's name in the conversation."""
    namespace: str = ""
    input: InputReader = field(default_factory=InputReader)
    """Reads the input of a custom tool's call."""

    @property
    def is_call(self) -> bool:
        """Whether the item is a call."""
        return self.kind in _CALLS

    @property
    def text(self) -> str:
        """The text, the arguments or the input so far."""
        return "".join(self.pieces)

    @property
    def function(self) -> JSON:
        """The name of the called function, and its namespace if it has one."""
        if not self.namespace:
            return {"name": self.name}
        name = self.name.removeprefix(self.namespace + ".")
        return {"name": name, "namespace": self.namespace}

    def part(self, text: str) -> JSON:
        """Return the item's only content part with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs if text else [],
        }

    def as_json(self, status: str, text: str | None) -> JSON:
        """Return the item.

        Args:
            status: The item's status.
            text: The text or the arguments, or None before the first one.
        """
        base: JSON = {"type": self.kind, "id": self.id, "status": status}
        if self.is_call:
            return base | {
                "call_id": self.call_id,
                **self.function,
                _CALLS[self.kind].field: text or "",
            }
        content = [] if text is None else [self.part(text)]
        if self.kind == "reasoning":
            return base | {"summary": [], "content": content}
        return base | {"role": "assistant", "content": content}


class Framing(NamedTuple):
    """How the events of a stream follow one another."""

    event: Callable[[bytes, str], bytes]
    """Returns the bytes of an event, from its JSON and its type."""
    done: bytes
    """The bytes after the last event."""


def _line(data: bytes, _: str) -> bytes:
    return data + b"\n"


SSE = Framing(sse_event, DONE)
LINES = Framing(_line, b"")
"""Each event's JSON is a line, which becomes a message of a WebSocket."""


class ResponsesAnswer:
    """Writes one answer of /v1/responses.

    Args:
        framing: How the events of a stream follow one another.
        repeated: The fields of the request that the response repeats.
        namespaces: Namespaces of the functions that have one, by name in the conversation.
        custom_tools: Names in the conversation of the tools whose input is text instead of JSON.
        keep: Called with the body of a response that has ended and with the answer's turn. None if
            the response is not stored.
        options: The response's id, model and time, and whether it has log-probabilities.
    """

    def __init__(
        self,
        framing: Framing,
        repeated: Mapping[str, object],
        namespaces: Mapping[str, str],
        custom_tools: frozenset[str],
        keep: Callable[[str, bytes, inference_pb2.Message], None] | None,
        options: ResponseOptions,
    ) -> None:
        self._framing = framing
        self._repeated = repeated
        self._namespaces = namespaces
        self._custom_tools = custom_tools
        self._keep = keep
        self._options = options
        # A client may send one request id twice, and the store has one response of each id.
        self._unique = os.urandom(16).hex() if keep else options.id
        self._id = f"resp_{self._unique}"
        self._output: list[JSON] = []
        self._closed: list[tuple[_OpenItem, str]] = []
        """The items of the output, with their texts or arguments."""
        self._item: _OpenItem | None = None
        self._pending: list[msgspec.Raw] = []
        """Log-probabilities of tokens whose text has yet to come, as a character takes several."""
        self._num_events = 0
        self._body: JSON = {}
        """The complete response. Empty until the answer has ended."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return the events that precede the first item."""
        response = self._response("in_progress")
        return self._events(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return the events for an event of the answer, and `[DONE]` after the last one."""
        done = self._framing.done if event.HasField("finished") else b""
        return self._events(self._changes(event)) + done

    def failed(self, error: ServiceError) -> bytes:
        """Return the events that end a stream with an error."""
        message, _ = in_api_words(error, "input", NAMES)
        response = self._response("failed")
        response["error"] = {"code": error_code(error), "message": message}
        return (
            self._events([{"type": "response.failed", "response": response}]) + self._framing.done
        )

    def collect(self, event: inference_pb2.GenerateResponse) -> None:
        """Add an event to the complete response."""
        self._changes(event)

    def whole(self, accepted: inference_pb2.Accepted) -> JSON:
        """Return the complete response."""
        return self._body

    def _changes(self, event: inference_pb2.GenerateResponse) -> list[JSON]:
        """Add an event to the answer, and return the events that tell the client about it."""
        if event.HasField("finished"):
            return self._end(event.finished)
        return self._add(event.delta) if event.HasField("delta") else []

    def _add(self, delta: inference_pb2.Delta) -> list[JSON]:
        events: list[JSON] = []
        logprobs = self._pending + self._logprobs(delta)
        self._pending = [] if delta.reasoning or delta.tool_calls else logprobs
        if delta.reasoning:
            events += self._grow("reasoning", "response.reasoning_text.delta", delta.reasoning)
        if delta.text:
            self._pending = []
            name = "response.output_text.delta"
            events += self._grow("message", name, delta.text, logprobs)
        for piece in delta.tool_calls:
            events += self._add_call(piece)
        return events

    def _grow(
        self, kind: str, name: str, text: str, logprobs: list[msgspec.Raw] | None = None
    ) -> list[JSON]:
        """Add text to the open item, which is opened first if it is of another kind."""
        events: list[JSON] = []
        if self._item is None or self._item.kind != kind:
            events += self._close("completed")
            events += self._open(kind)
        item = self._item
        assert item is not None
        item.pieces.append(text)
        delta = {"type": name, **_place(item), "content_index": 0, "delta": text}
        if logprobs is not None:
            item.logprobs += logprobs
            delta["logprobs"] = logprobs
        return [*events, delta]

    def _add_call(self, piece: inference_pb2.ToolCallPiece) -> list[JSON]:
        events: list[JSON] = []
        if piece.name:
            events += self._close("completed")
            kind = "custom_tool_call" if piece.name in self._custom_tools else "function_call"
            events += self._open(kind, call_id=piece.id, name=piece.name)
        item = self._item
        assert item, "arguments follow the start of their call"
        assert item.is_call, "arguments follow the start of their call"
        is_custom = item.kind == "custom_tool_call"
        text = item.input.push(piece.arguments) if is_custom else piece.arguments
        return [*events, *self._grow_call(item, text)]

    def _grow_call(self, item: _OpenItem, text: str) -> list[JSON]:
        """Add text to the arguments or the input of the open call."""
        if not text:
            return []
        item.pieces.append(text)
        return [{"type": f"{_CALLS[item.kind].event}.delta", **_place(item), "delta": text}]

    def _open(self, kind: str, call_id: str = "", name: str = "") -> list[JSON]:
        index = len(self._output)
        prefix = _CALLS[kind].prefix if kind in _CALLS else _PREFIXES[kind]
        item = _OpenItem(kind, f"{prefix}_{self._unique}_{index}", index)
        item.call_id = call_id
        item.name = name
        item.namespace = self._namespaces.get(name, "")
        self._item = item
        added = {
            "type": "response.output_item.added",
            "output_index": index,
            "item": item.as_json("in_progress", None),
        }
        if item.is_call:
            return [added]
        part = {
            "type": "response.content_part.added",
            **_place(item),
            "content_index": 0,
            "part": item.part(""),
        }
        return [added, part]

    def _close(self, status: str) -> list[JSON]:
        """Close the open item, if there is one."""
        item = self._item
        if item is None:
            return []
        self._item = None
        rest = self._grow_call(item, item.input.close()) if item.kind == "custom_tool_call" else []
        text = item.text
        closed = item.as_json(status, text)
        self._output.append(closed)
        self._closed.append((item, text))
        done = {
            "type": "response.output_item.done",
            "output_index": item.index,
            "item": closed,
        }
        place = _place(item)
        ended: JSON
        if item.is_call:
            call = _CALLS[item.kind]
            # Only the event of functions has the name.
            named = item.function if item.kind == "function_call" else {}
            ended = {"type": f"{call.event}.done", **place, **named, call.field: text}
            return [*rest, ended, done]

        place["content_index"] = 0
        if item.kind == "reasoning":
            ended = {"type": "response.reasoning_text.done", **place, "text": text}
        else:
            ended = {
                "type": "response.output_text.done",
                **place,
                "text": text,
                "logprobs": item.logprobs,
            }
        part = {"type": "response.content_part.done", **place, "part": item.part(text)}
        return [ended, part, done]

    def _end(self, finished: inference_pb2.Finished) -> list[JSON]:
        """Close the last item, and return the events that end the stream."""
        status = "completed" if finished.reason in _COMPLETE else "incomplete"
        events: list[JSON] = []
        if self._item is None and not self._output:
            events += self._open("message")  # an empty answer is a message without text
        events += self._close(status)

        response = self._response(status)
        response["usage"] = self._usage(finished.usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": _reason(finished)}
        else:
            response["completed_at"] = int(time.time())
        self._body = response
        if self._keep:
            self._keep(self._id, _encode(response), _turn(self._closed))
        return [*events, {"type": f"response.{status}", "response": response}]

    def _response(self, status: str) -> JSON:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._options.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._options.model,
            "output": list(self._output),
            "service_tier": "default",
            "usage": None,
            **self._repeated,
        }

    def _usage(self, counted: inference_pb2.Usage) -> JSON:
        cached = {each.tier: each.num_tokens for each in cached_tokens(counted)}
        return {
            "input_tokens": counted.prompt_tokens,
            "input_tokens_details": prompt_tokens_details(cached) | {"cache_write_tokens": 0},
            "output_tokens": counted.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
            "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        }

    def _logprobs(self, delta: inference_pb2.Delta) -> list[msgspec.Raw]:
        if not self._options.logprobs:
            return []
        return [chat_logprob(entry) for entry in delta.logprobs if not entry.is_end]

    def _events(self, events: list[JSON]) -> bytes:
        data = []
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
            data.append(self._framing.event(_encode(event), str(event["type"])))
        return b"".join(data)


def _place(item: _OpenItem) -> JSON:
    return {"item_id": item.id, "output_index": item.index}


def _turn(items: list[tuple[_OpenItem, str]]) -> inference_pb2.Message:
    """Return an answer as a turn of the conversation, for requests that continue it."""
    texts = {
        kind: "".join(text for item, text in items if item.kind == kind)
        for kind in ("reasoning", "message")
    }
    turn = inference_pb2.Message(
        role="assistant", content=texts["message"], reasoning=texts["reasoning"]
    )
    for item, text in items:
        if item.is_call:
            arguments = as_arguments(text) if item.kind == "custom_tool_call" else text
            turn.tool_calls.add(id=item.call_id, name=item.name, arguments=arguments)
    return turn


def _reason(finished: inference_pb2.Finished) -> str:
    """Return why an answer is incomplete: OpenAI's word, or that of `stop_reason` in chats."""
    if finished.reason == inference_pb2.FINISH_REASON_TIMEOUT:
        return finished.stop_string or "timeout"
    return "max_output_tokens"
