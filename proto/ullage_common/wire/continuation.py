"""Keeps the received tokens of an answer, so that another engine can continue it.

A reader of an engine's answer, which is a router or a client with tickets, keeps a `Progress` for
it. Beam searches and the best of several answers are known only at their end. Nothing of them is
kept, so a lost one starts from the beginning.
"""

from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import has_output, is_growing, num_answers

MAX_STALLED_LOSSES = 3
"""Number of lost engines without a new token after which the request is given up as the cause."""
MAX_LOSSES = 16
"""Total number of lost engines after which a request is given up."""
MAX_BREAKAGES = 2
"""Number of engines that broke on the request, after which it is given up."""
BREAKAGES = frozenset({"WORKER_LOST", "REQUEST_FAILED"})
"""Reasons in errors of engines that broke on a request."""


@dataclass(slots=True)
class _Answer:
    """One answer so far."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    """Length of the text in Unicode code points."""
    reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED


class Progress:
    """The output of one request so far.

    Args:
        request: the request as it arrived. If it has a continuation, the output begins with that.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.num_tokens = 0
        """Output tokens of all answers."""
        self.has_begun = False
        """Whether an engine accepted the request, here or before its continuation."""
        self.is_accepted = False
        """Whether an engine accepted the request here."""
        self.max_tokens = 0
        """Granted output limit of each answer (0 before the request is accepted)."""
        self.fingerprints: tuple[str, ...] = ()
        """Fingerprints of the engines that generated tokens, in order."""
        self._fingerprint = ""
        """Fingerprint of the engine that accepted the request last."""
        self._seed = 0
        self._degraded: tuple[str, ...] = ()

        self._is_growing = is_growing(request)
        num = num_answers(request.samples) if request.HasField("samples") else 1
        self._answers = [_Answer() for _ in range(num)]
        if request.HasField("continuation"):
            self._restore(request)

    def _restore(self, request: pb.GenerateRequest) -> None:
        continuation = request.continuation
        self._answers = [
            _Answer(list(answer.token_ids), answer.text_length, answer.reason)
            for answer in continuation.answers
        ]
        self.num_tokens = sum(len(answer.token_ids) for answer in self._answers)
        self._seed = request.sampling.seed
        self._degraded = tuple(continuation.degraded)
        # The tokens of a server that sent no fingerprints have an unknown one.
        self.fingerprints = tuple(continuation.fingerprints) or ("",)
        self.max_tokens = request.stop.max_tokens
        self.has_begun = True

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(len(answer.token_ids) for answer in self._answers)

    @property
    def is_whole(self) -> bool:
        """Whether the ids of all tokens are known, so that another engine can continue."""
        num_ids = sum(len(answer.token_ids) for answer in self._answers)
        return not self._is_growing or self.num_tokens == num_ids

    @property
    def is_inexact(self) -> bool:
        """Whether the tokens come from engines with different fingerprints."""
        return len(self.fingerprints) > 1

    @property
    def goes_on_inexactly(self) -> bool:
        """Whether the last engine's numerics differ from those of the tokens so far."""
        return bool(self.fingerprints) and self.fingerprints != (self._fingerprint,)

    def on_accepted(self, accepted: pb.Accepted, max_tokens: int) -> None:
        """Keep the limits and the seed that the first engine granted.

        Args:
            max_tokens: the output limit in the request to the engine.

        Raises:
            ServiceError: UNIMPLEMENTED, a later engine would start from the beginning.
        """
        if self.has_begun and accepted.continued_tokens != self.num_tokens:
            raise _begins_anew(accepted.engine)
        self.is_accepted = True
        self._fingerprint = accepted.fingerprint
        if not self.has_begun:
            self.has_begun = True
            self._seed = accepted.seed
            self._degraded = tuple(accepted.degraded)
            self.max_tokens = min(max_tokens, accepted.max_tokens or max_tokens)

    def on_delta(self, delta: pb.Delta) -> None:
        """Keep new tokens."""
        self.num_tokens += delta.num_tokens
        if delta.num_tokens and self._fingerprint not in self.fingerprints:
            self.fingerprints += (self._fingerprint,)
        if self._is_growing:
            answer = self._answers[delta.sample]
            answer.token_ids.extend(delta.token_ids)
            answer.text_length += len(delta.text)

    def on_sample_finished(self, finished: pb.SampleFinished) -> None:
        """Keep the end of one answer."""
        if self._is_growing:
            self._answers[finished.sample].reason = finished.reason

    def on_loss(self) -> None:
        """Drop an answer that cannot be continued and will start from the beginning."""
        if not self._is_growing:
            self.num_tokens = 0
            self.fingerprints = ()

    def write(self, request: pb.GenerateRequest) -> None:
        """Make the request continue the answer, with the limits that the first engine granted."""
        request.sampling.seed = self._seed
        max_tokens = min(self.max_tokens, request.stop.max_tokens or self.max_tokens)
        request.stop.max_tokens = max_tokens
        request.stop.min_tokens = min(request.stop.min_tokens, max_tokens)
        request.ClearField("continuation")
        if not (self._is_growing and has_output(self._answers)):
            return
        request.continuation.degraded.extend(self._degraded)
        request.continuation.fingerprints.extend(self.fingerprints)
        for answer in self._answers:
            request.continuation.answers.add(
                token_ids=answer.token_ids, text_length=answer.text_length, reason=answer.reason
            )


class Losses:
    """The engines that one request lost after its first token."""

    def __init__(self) -> None:
        self.total = 0
        """Number of losses."""
        self._stalled = 0
        """Number of losses since the last new token."""
        self._num_breakages = 0
        self._num_tokens = 0

    def add(self, error: ServiceError, progress: Progress) -> None:
        """Count an engine that was lost with this error."""
        has_grown = progress.num_tokens > self._num_tokens
        self._stalled = 1 if has_grown else self._stalled + 1
        self._num_tokens = progress.num_tokens
        self._num_breakages += error.reason in BREAKAGES
        self.total += 1

    @property
    def is_suspect(self) -> bool:
        """Whether the request may crash engines, so that its next prompt should run alone."""
        return self._stalled >= MAX_STALLED_LOSSES - 1

    @property
    def are_too_many(self) -> bool:
        """Whether the request is given up."""
        is_cause = self._stalled >= MAX_STALLED_LOSSES or self._num_breakages >= MAX_BREAKAGES
        return is_cause or self.total >= MAX_LOSSES


def write_cached(usage: pb.Usage, accepted: pb.Accepted) -> None:
    """Write the cached prompt tokens as the answer's first engine counted them.

    For a later engine the tokens so far are part of the prompt.
    """
    usage.cached_tokens = accepted.cached_tokens
    del usage.cached_by_tier[:]
    usage.cached_by_tier.extend(accepted.cached_by_tier)


def _begins_anew(engine: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        "CONTINUATION_UNKNOWN",
        f"engine {engine} cannot continue another engine's answer; update it",
    )
