"""A step's answer whose first tokens are held back until they are judged."""

import contextlib
from collections.abc import AsyncIterator

from ullage.inference.v1 import inference_pb2
from ullage_router.call import Event, ResponseStream
from ullage_router.policy.cascade import Confidence
from ullage_router.policy.decision import Decision


class BufferedAnswer:
    """A step's answer whose first tokens wait until they are judged.

    Args:
        stream: The answer as the step began it.
        with_logprobs: Whether the client asked for log probabilities; otherwise they serve the
            judgement only, and the client does not get them.
    """

    def __init__(self, stream: ResponseStream, with_logprobs: bool) -> None:
        self.accepted = inference_pb2.Accepted()
        self.accepted.CopyFrom(stream.accepted)
        self._stream = stream
        self._with_logprobs = with_logprobs
        self._coming = stream.events()
        self._buffered: list[Event] = []

    @property
    def output_tokens(self) -> int:
        """The output tokens that the step has generated so far."""
        return self._stream.output_tokens

    async def judge(self, confidence: Confidence) -> None:
        """Hold back the tokens that are judged, or the whole answer if that is shorter.

        Args:
            confidence: Counts the tokens and their log probabilities.

        Raises:
            ServiceError: The answer broke off.
        """
        async for event in self._coming:
            self._buffered.append(event)
            logprobs = (entry.logprob for entry in event.delta.logprobs)
            confidence.add(event.delta.num_tokens, logprobs)
            if confidence.is_complete or event.HasField("finished"):
                return

    def describe(self, request_id: str, decision: Decision) -> None:
        """Write the request's id, the model and the attempts into `accepted`."""
        self.accepted.request_id = request_id
        self.accepted.model = decision.model
        del self.accepted.attempts[:]
        self.accepted.attempts.extend(attempt.to_wire() for attempt in decision.attempts)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events that were held back, then the rest."""
        while self._buffered:
            yield self._visible(self._buffered.pop(0))
        async for event in self._coming:
            yield self._visible(event)

    def close(self) -> None:
        """Cancel the answer."""
        self._stream.close()

    async def discard(self) -> None:
        """End the answer unread, and wait until its generator has closed."""
        self._stream.close()
        aclose = getattr(self._coming, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):  # no client waits for this answer
                await aclose()

    def _visible(self, event: Event) -> Event:
        """Return the event as the client may see it."""
        if self._with_logprobs or not event.delta.logprobs:
            return event
        bare = Event()  # a copy, since other clients may share the event and want its logprobs
        bare.CopyFrom(event)
        bare.delta.ClearField("logprobs")
        return bare
