"""Writes the chunks of a streamed answer as server-sent events.

The JSON around the text is the same for all chunks of a choice, so it is encoded only once.
"""

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.openai.responses import JSON, Finished, Format, ResponseOptions
from ullage_router.telemetry.record import RESUMED_INEXACT

_MARK = "\ue000the text\ue000"
"""Placeholder for the text at which an encoded chunk is split. No other field contains it."""
_encode = msgspec.json.Encoder().encode


class Chunks:
    """Converts the events of an answer to server-sent events.

    Args:
        form: The format, which converts an event to chunks.
        options: Settings that determine which fields the chunks have in addition to text.
    """

    def __init__(self, form: Format, options: ResponseOptions) -> None:
        self._form = form
        self._is_plain = not (options.logprobs or options.token_ids or options.continuous_usage)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """For each choice, the bytes before and after the text in a chunk that has only text."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return the bytes to send before the first event."""
        return _events(self._form.opening(accepted))

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return the bytes to send for an event of the answer (empty if the event has no chunk)."""
        match event.WhichOneof("event"):
            case "finished":
                return _events(self._form.closing(event.finished)) + _comment(event.finished)
            case "sample_finished":
                return _events(self._form.ended(event.sample_finished))
            case _:
                return self._piece(event.delta)

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


def sse_event(data: bytes) -> bytes:
    """Return JSON as a server-sent event. The JSON must not contain a line break."""
    return b"data: " + data + b"\n\n"


def _comment(finished: Finished) -> bytes:
    """Return the final comment if the answer was resumed inexactly (empty for other answers).

    An engine that resumed such an answer may have produced different text.
    """
    return f": {RESUMED_INEXACT}: true\n\n".encode() if finished.resumed_inexact else b""


def _events(chunks: list[JSON]) -> bytes:
    return b"".join(sse_event(_encode(chunk)) for chunk in chunks)
