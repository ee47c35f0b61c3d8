"""An answer whose first tokens wait until they are judged."""

import contextlib
import time
from collections.abc import AsyncIterator

from ullage.inference.v1 import inference_pb2
from ullage_router.answer import Answer, Event
from ullage_router.cascade.plan import Confidence
from ullage_router.stats import Record

DECIDED = (
    "prompt_tokens",
    "predicted_bytes",
    "action",
    "route",
    "reason",
    "engine",
    "queued_s",
    "limits",
    "model",
    "side",
    "revision",
    "trail",
)


class Held:
    """A step's answer; what was held comes first.

    Args:
        answer: as the step began it.
        scratch: record of this attempt alone.
        with_logprobs: the client asked for them; otherwise they are for the judgement only.
    """

    def __init__(self, answer: Answer, scratch: Record, with_logprobs: bool) -> None:
        self.accepted = inference_pb2.Accepted()
        self.accepted.CopyFrom(answer.accepted)
        self.scratch = scratch
        self._answer = answer
        self._with_logprobs = with_logprobs
        self._coming = answer.events()
        self._first: list[Event] = []
        self._record: Record | None = None

    async def judge(self, confidence: Confidence) -> None:
        """Holds back as many tokens as are judged, or the whole answer if that is shorter.

        Raises:
            ServiceError: it broke off before.
        """
        async for event in self._coming:
            self._first.append(event)
            logprobs = (entry.logprob for entry in event.delta.logprobs)
            confidence.add(event.delta.num_tokens, logprobs)
            if confidence.is_complete or event.HasField("finished"):
                return

    def release(self, record: Record) -> None:
        """It is the answer; `record` takes over what was decided and counts its tokens."""
        adopt(record, self.scratch)
        record.ttft_s = time.monotonic() - record.arrived
        self._record = record

    def tell(self, record: Record) -> None:
        """Accepted says what was tried."""
        self.accepted.request_id, self.accepted.model = record.request_id, record.model
        del self.accepted.attempts[:]
        self.accepted.attempts.extend(attempt.to_wire() for attempt in record.attempts)

    async def events(self) -> AsyncIterator[Event]:
        while self._first:
            yield self._passed(self._first.pop(0))
        async for event in self._coming:
            yield self._passed(event)

    def close(self) -> None:
        self._answer.close()

    async def discard(self) -> None:
        """Ends it unread."""
        self._answer.close()
        aclose = getattr(self._coming, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):  # it is no longer anybody's answer
                await aclose()

    def _passed(self, event: Event) -> Event:
        if self._record is not None:
            self._record.output_tokens = self.scratch.output_tokens
        if self._with_logprobs or not event.delta.logprobs:
            return event
        bare = Event()  # others may share this one and have asked for it all
        bare.CopyFrom(event)
        bare.delta.ClearField("logprobs")
        return bare


def adopt(record: Record, scratch: Record) -> None:
    """The request's record takes over what an attempt's says was decided."""
    for name in DECIDED:
        setattr(record, name, getattr(scratch, name))
    record.degraded[:] = scratch.degraded
