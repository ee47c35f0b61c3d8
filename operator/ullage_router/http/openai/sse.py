"""Writes an answer in OpenAI's chunks, as server-sent events or as a whole.

The JSON around the text is the same for all chunks of a choice, so it is encoded only once.
"""

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.http.openai.errors import DONE, ErrorFormat, sse_event
from ullage_router.http.openai.responses import (
    JSON,
    Collected,
    Finished,
    Format,
    ResponseOptions,
)
from ullage_router.telemetry.record import RESUMED_INEXACT

_MARK = "\ue000the text\ue000"
"""Placeholder for the text at which an encoded chunk is split. No other field contains it."""
_encode = msgspec.json.Encoder().encode


class ChunkedAnswer:
    """Converts the events of an answer to server-sent events that end with [DONE], or to one body.

    Args:
        form: Converts an event to chunks.
        errors: The format of errors.
        options: Settings that determine which fields the chunks have in addition to text.
    """

    def __init__(self, form: Format, errors: ErrorFormat, options: ResponseOptions) -> None:
        self._form = form
        self._errors = errors
        self._parts = [Collected() for _ in range(options.n)]
        self._finished = Finished()
        self._is_echo_only = options.is_echo_only
        self._hides_reasoning = options.hides_reasoning
        self._is_plain = not (options.logprobs or options.token_ids or options.continuous_usage)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """For each choice, the bytes before and after the text in a chunk that has only text."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return the bytes to send before the first event."""
        return _events(self._form.opening(accepted))

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return the bytes to send for an event of the answer (empty if the event has no chunk)."""
        event = self._shown(event)
        match event.WhichOneof("event"):
            case "finished":
                closing = _events(self._form.closing(event.finished))
                return closing + _comment(event.finished) + DONE
            case "sample_finished":
                return _events(self._form.ended(event.sample_finished))
            case _:
                return self._piece(event.delta)

    def failed(self, error: ServiceError) -> bytes:
        """Return the last bytes of a stream that fails."""
        return self._errors.event(error)

    def collect(self, event: inference_pb2.GenerateResponse) -> None:
        """Add an event to the complete response."""
        event = self._shown(event)
        match event.WhichOneof("event"):
            case "finished":
                self._finished = event.finished
            case "sample_finished":
                self._parts[event.sample_finished.sample].end = event.sample_finished
            case _:
                self._parts[event.delta.sample].add(event.delta)

    def whole(self, accepted: inference_pb2.Accepted) -> JSON:
        """Return the body of the complete response."""
        return self._form.whole(accepted, self._parts, self._finished)

    def _shown(self, event: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Return the part of an event that the client wants to see."""
        if self._is_echo_only:
            return _echo_only(event)
        return _without_reasoning(event) if self._hides_reasoning else event

    def _piece(self, delta: inference_pb2.Delta) -> bytes:
        if not self._is_plain or not delta.text or delta.reasoning or delta.tool_calls:
            return _events(self._form.piece(delta))
        frame = self._frames.get(delta.sample)
        if frame is None:
            frame = self._frames[delta.sample] = self._make_frame(delta.sample)
        return frame[0] + _encode(delta.text) + frame[1]

    def _make_frame(self, sample: int) -> tuple[bytes, bytes]:
        example = self._form.piece(inference_pb2.Delta(text=_MARK, sample=sample))
        before, _, after = _events(example).partition(_encode(_MARK))
        return before, after


def _without_reasoning(
    event: inference_pb2.GenerateResponse,
) -> inference_pb2.GenerateResponse:
    """Return an event without the text of reasoning. Its tokens still count."""
    if not event.delta.reasoning:
        return event
    own = inference_pb2.GenerateResponse()
    own.CopyFrom(event)  # other clients may share the event
    own.delta.reasoning = ""
    return own


def _echo_only(event: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
    """Return an event without the token that is generated behind an echoed prompt."""
    own = inference_pb2.GenerateResponse()
    own.CopyFrom(event)  # other clients may share the event
    match own.WhichOneof("event"):
        case "finished":
            own.finished.usage.completion_tokens = 0
            own.finished.reason = inference_pb2.FINISH_REASON_LENGTH
            own.finished.stop_string = ""
        case "sample_finished":
            own.sample_finished.reason = inference_pb2.FINISH_REASON_LENGTH
            own.sample_finished.stop_string = ""
        case _:
            if own.delta.num_tokens:
                own.delta.Clear()
    return own


def _comment(finished: Finished) -> bytes:
    """Return the final comment if the answer was resumed inexactly (empty for other answers).

    An engine that resumed such an answer may have produced different text.
    """
    return f": {RESUMED_INEXACT}: true\n\n".encode() if finished.resumed_inexact else b""


def _events(chunks: list[JSON]) -> bytes:
    return b"".join(sse_event(_encode(chunk)) for chunk in chunks)
