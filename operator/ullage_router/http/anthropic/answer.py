"""Writes an answer as the content blocks of the Messages API, with the events of its stream.

An answer consists of thoughts, text and calls, in any order that the model chooses. Each is a block
that starts, grows and stops before the next one starts. Clients may also run calls whose arguments
break off. In a complete message such a call is text. A stream has begun its block by then, so the
stream ends with the reason `max_tokens`, or with an error if no limit is the cause.
"""

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import broken_call
from ullage_router.http.anthropic.errors import error_event
from ullage_router.http.openai.errors import sse_event
from ullage_router.http.openai.responses import JSON, ResponseOptions

_encode = msgspec.json.Encoder().encode
_CUT_SHORT = frozenset({inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_TIMEOUT})
_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MessagesAnswer:
    """Writes one answer of /v1/messages.

    Args:
        options: The response's id and model.
        shows_thinking: Whether the answer has the model's thoughts.
    """

    def __init__(self, options: ResponseOptions, *, shows_thinking: bool) -> None:
        self._options = options
        self._shows_thinking = shows_thinking
        self._blocks: list[JSON] = []
        self._is_open = False
        """Whether the last block may grow."""
        self._pieces: list[str] = []
        """The pieces of the open block's text, or of its arguments."""
        self._broken = ""
        """The function of a call whose arguments are no object (empty if there is none)."""
        self._is_after_broken = False
        """Whether the last block is such a call, of which following text is a part."""
        self._body: JSON = {}
        """The complete message. Empty until the answer has ended."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return the event that precedes the first block."""
        counted = inference_pb2.Usage(
            prompt_tokens=accepted.prompt_tokens, cached_tokens=accepted.cached_tokens
        )
        return _events([{"type": "message_start", "message": self._message([], _usage(counted))}])

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return the events for an event of the answer."""
        events = self._changes(event)
        finished = event.finished
        is_cut = finished.reason in _CUT_SHORT or bool(finished.stop_string)
        if event.HasField("finished") and self._broken and not is_cut:
            return _events(events[:-2]) + error_event(broken_call(self._broken))
        return _events(events)

    def failed(self, error: ServiceError) -> bytes:
        """Return the event that ends a stream with an error."""
        return error_event(error)

    def collect(self, event: inference_pb2.GenerateResponse) -> None:
        """Add an event to the complete message."""
        self._changes(event)

    def whole(self, accepted: inference_pb2.Accepted) -> JSON:
        """Return the complete message."""
        return self._body

    def _changes(self, event: inference_pb2.GenerateResponse) -> list[JSON]:
        """Add an event to the answer, and return the events that tell the client about it."""
        if event.HasField("finished"):
            return self._end(event.finished)
        return self._add(event.delta) if event.HasField("delta") else []

    def _add(self, delta: inference_pb2.Delta) -> list[JSON]:
        events: list[JSON] = []
        if delta.reasoning and self._shows_thinking:
            start: JSON = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._grow(start, delta.reasoning)
        if delta.text:
            events += self._grow({"type": "text", "text": ""}, delta.text)
        for piece in delta.tool_calls:
            if piece.name:
                events += self._stop()
                call: JSON = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                events += self._start(call)
            if piece.arguments:
                assert self._is_open, "arguments follow the start of their call"
                self._pieces.append(piece.arguments)
                added: JSON = {"type": "input_json_delta", "partial_json": piece.arguments}
                events.append(self._delta(added))
        return events

    def _grow(self, block: JSON, text: str) -> list[JSON]:
        """Add text to the open block, or to a new one if the open block has another type."""
        events: list[JSON] = []
        if not (self._is_open and self._blocks[-1]["type"] == block["type"]):
            events = [*self._stop(), *self._start(block)]
        self._pieces.append(text)
        kind = str(block["type"])
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _start(self, block: JSON) -> list[JSON]:
        index = len(self._blocks)
        self._blocks.append(dict(block))
        self._is_open = True
        return [{"type": "content_block_start", "index": index, "content_block": block}]

    def _delta(self, delta: JSON) -> JSON:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop(self) -> list[JSON]:
        """Stop the open block, if there is one."""
        if not self._is_open:
            return []
        text = "".join(self._pieces)
        self._pieces = []
        self._is_open = False
        stopped: JSON = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._fill(self._blocks[-1], text)
        return [stopped]

    def _fill(self, block: JSON, text: str) -> None:
        """Complete a block. A call whose arguments are no object becomes text."""
        was_broken = self._is_after_broken
        self._is_after_broken = False
        if block["type"] == "text" and was_broken:
            self._blocks[-2]["text"] = f"{self._blocks[-2]['text']}{text}"
        elif block["type"] != "tool_use":
            block[str(block["type"])] = text
        elif _is_object(text):
            block["input"] = msgspec.Raw(text.encode())
        else:
            self._broken = str(block["name"])
            self._blocks[-1] = {"type": "text", "text": text}
            self._is_after_broken = True

    def _end(self, finished: inference_pb2.Finished) -> list[JSON]:
        """Stop the last block, and return the events that end the stream."""
        events = self._stop()
        usage = _usage(finished.usage)
        reason: JSON = {"stop_reason": self._stop_reason(finished), "stop_sequence": None}
        if reason["stop_reason"] == "stop_sequence":
            reason["stop_sequence"] = finished.stop_string
        blocks = [block for block in self._blocks if block.get("text") != ""]
        self._body = self._message(blocks, usage) | reason
        return [
            *events,
            {"type": "message_delta", "delta": reason, "usage": usage},
            {"type": "message_stop"},
        ]

    def _stop_reason(self, finished: inference_pb2.Finished) -> str:
        match finished.reason:
            case inference_pb2.FINISH_REASON_TOOL_CALLS if self._has_calls:
                return "tool_use"
            case inference_pb2.FINISH_REASON_STOP | inference_pb2.FINISH_REASON_TOOL_CALLS:
                return "stop_sequence" if finished.stop_string else "end_turn"
            case _:
                return "max_tokens"

    @property
    def _has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    def _message(self, content: list[JSON], usage: JSON) -> JSON:
        return {
            "id": f"msg_{self._options.id}",
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _usage(counted: inference_pb2.Usage) -> JSON:
    """Return Anthropic's usage object, whose input tokens are those that were not cached."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }


def _is_object(arguments: str) -> bool:
    """Return whether the arguments of a call are complete."""
    try:
        _ARGUMENTS.decode(arguments)
    except msgspec.DecodeError:
        return False
    return True


def _events(events: list[JSON]) -> bytes:
    return b"".join(sse_event(_encode(event), str(event["type"])) for event in events)
