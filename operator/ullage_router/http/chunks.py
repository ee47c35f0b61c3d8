"""The events of a streamed answer as bytes; what all its chunks share is made once."""

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.answers import JSON, Format, Wanted
from ullage_router.http.sse import event

# Stands for the text in a chunk that is made to be cut in two; no text has it by chance.
_MARK = "\ue000the text\ue000"

_encode = msgspec.json.Encoder().encode


class Chunks:
    """Turns events into server-sent ones.

    Args:
        form: says what is in a chunk.
        wanted: what chunks carry besides text.
    """

    def __init__(self, form: Format, wanted: Wanted) -> None:
        self._form = form
        self._is_plain = not (wanted.logprobs or wanted.token_ids)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What is before and after the text in a plain chunk, by choice."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Before the first event."""
        return _events(self._form.opening(accepted))

    def of(self, told: inference_pb2.GenerateResponse) -> bytes:
        """Of one event of the answer; empty when it says nothing."""
        match told.WhichOneof("event"):
            case "finished":
                return _events(self._form.closing(told.finished))
            case "sample_finished":
                return _events(self._form.ended(told.sample_finished))
            case _:
                return self._piece(told.delta)

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


def _events(chunks: list[JSON]) -> bytes:
    return b"".join(event(_encode(chunk)) for chunk in chunks)
