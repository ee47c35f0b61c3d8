"""Keeps the received tokens of an answer, so that another engine can continue it.

A router, or a client with tickets, keeps a `Progress` for each answer that it receives from an
engine. Requests with beam search or `best_of` produce results only at the end. Their tokens are not
kept, so they restart from the beginning if the engine is lost.
"""

from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import has_output, is_growing, num_answers

MAX_STALLED_LOSSES = 3
"""The request is abandoned after losing this many engines in a row without a new token.

The request itself is then considered to be the cause.
"""
MAX_LOSSES = 16
"""The request is abandoned after losing this many engines in total."""
MAX_BREAKAGES = 2
"""The request is abandoned after losing this many engines for reasons in BREAKAGES."""
BREAKAGES = frozenset({"WORKER_LOST", "REQUEST_FAILED"})
"""Error reasons that suggest that the request itself made an engine fail."""


@dataclass(slots=True)
class _Answer:
    """The part of one answer that has been received so far."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    """Length of the text in Unicode code points."""
    reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED


class Progress:
    """The output of one request that has been received so far.

    Args:
        request: the original request. If it has a continuation, the output begins with the
            continuation's tokens.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.num_tokens = 0
        """Total number of output tokens in all answers."""
        self.has_begun = False
        """Whether an engine has accepted the request or the request continues an earlier answer."""
        self.is_accepted = False
        """Whether an engine has accepted the request since this object was created."""
        self.max_tokens = 0
        """Maximum output tokens granted per answer (0 before the request is accepted)."""
        self.has_left_worker = False
        """Whether the request has left an engine that was without a worker.

        It does so once. It may be the reason why workers die, and the engine counts these.
        """
        self.fingerprints: tuple[str, ...] = ()
        """Fingerprints of the engines that generated tokens, without duplicates, in order."""
        self._fingerprint = ""
        """Fingerprint of the last engine that accepted the request."""
        self._seed = 0
        self._degraded: tuple[str, ...] = ()
        self._num_prompt_tokens = 0
        """Number of prompt tokens that an engine has accepted, or 0 before that."""
        self._num_scored = 0
        """Number of leading prompt tokens whose log-probabilities have been received."""

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
        """Number of tokens in the longest answer."""
        return max(len(answer.token_ids) for answer in self._answers)

    @property
    def is_whole(self) -> bool:
        """Whether all token ids are known, so that another engine can continue the output."""
        num_ids = sum(len(answer.token_ids) for answer in self._answers)
        return not self._is_growing or self.num_tokens == num_ids

    @property
    def is_inexact(self) -> bool:
        """Whether engines with different fingerprints generated the tokens.

        The answer may then differ from the one that a single engine would have given.
        """
        return len(self.fingerprints) > 1

    @property
    def goes_on_inexactly(self) -> bool:
        """Whether some tokens came from an engine with a different fingerprint than the latest."""
        return bool(self.fingerprints) and self.fingerprints != (self._fingerprint,)

    def on_accepted(self, accepted: pb.Accepted, max_tokens: int) -> None:
        """Record that an engine accepted the request. The first engine's limits and seed are kept.

        Args:
            max_tokens: the output limit in the request to the engine.

        Raises:
            ServiceError: UNIMPLEMENTED, a later engine would restart the answer instead of
                continuing it.
        """
        if self.has_begun and accepted.continued_tokens != self.num_tokens:
            raise _begins_anew(accepted.engine)
        self.is_accepted = True
        self._fingerprint = accepted.fingerprint
        self._num_prompt_tokens = self._num_prompt_tokens or accepted.prompt_tokens
        if not self.has_begun:
            self.has_begun = True
            self._seed = accepted.seed
            self._degraded = tuple(accepted.degraded)
            self.max_tokens = min(max_tokens, accepted.max_tokens or max_tokens)

    def is_new(self, delta: pb.Delta) -> bool:
        """Return whether a delta says anything that has not been received.

        An engine that takes over before the first token sends the log-probabilities of all prompt
        tokens again. This removes from the delta those that have been received.
        """
        if not delta.HasField("prompt_logprobs"):
            return True
        scored = delta.prompt_logprobs
        num_received = min(len(scored.tokens), self._num_scored - scored.start)
        if num_received > 0:
            del scored.tokens[:num_received]
            scored.start += num_received
        self._num_scored += len(scored.tokens)
        return bool(scored.tokens)

    def on_delta(self, delta: pb.Delta) -> None:
        """Record a delta's new tokens."""
        self.num_tokens += delta.num_tokens
        if delta.num_tokens and self._fingerprint not in self.fingerprints:
            self.fingerprints += (self._fingerprint,)
        if self._is_growing:
            answer = self._answers[delta.sample]
            answer.token_ids.extend(delta.token_ids)
            answer.text_length += len(delta.text)

    def on_sample_finished(self, finished: pb.SampleFinished) -> None:
        """Record why one answer ended."""
        if self._is_growing:
            self._answers[finished.sample].reason = finished.reason

    def on_loss(self) -> None:
        """Discard output that cannot be continued. The next engine generates it again."""
        if not self._is_growing:
            self.num_tokens = 0
            self._num_scored = 0
            self.fingerprints = ()

    def write(self, request: pb.GenerateRequest) -> None:
        """Modify a request so that the next engine continues this output.

        The first engine's seed, output limit and prompt still apply.
        """
        if request.truncate_prompt_tokens and self._num_prompt_tokens:
            # What fits the context depends on `max_tokens`, which the engine may have lowered.
            request.truncate_prompt_tokens = self._num_prompt_tokens
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
    """Counts the engines that one request lost after its first token.

    The counts show whether the request itself may be crashing engines, and when to abandon it.
    """

    def __init__(self) -> None:
        self.total = 0
        """Total number of engines lost so far."""
        self._stalled = 0
        """Number of engines lost since the last new token."""
        self._num_breakages = 0
        self._num_tokens = 0

    def add(self, error: ServiceError, progress: Progress) -> None:
        """Record that an engine was lost with this error."""
        has_grown = progress.num_tokens > self._num_tokens
        self._stalled = 1 if has_grown else self._stalled + 1
        self._num_tokens = progress.num_tokens
        self._num_breakages += error.reason in BREAKAGES
        self.total += 1

    @property
    def is_suspect(self) -> bool:
        """Whether the request may be crashing engines. If so, its next attempt should run alone."""
        return self._stalled >= MAX_STALLED_LOSSES - 1

    @property
    def are_too_many(self) -> bool:
        """Whether the request should be abandoned because too many engines were lost."""
        is_cause = self._stalled >= MAX_STALLED_LOSSES or self._num_breakages >= MAX_BREAKAGES
        return is_cause or self.total >= MAX_LOSSES


def write_cached(usage: pb.Usage, accepted: pb.Accepted) -> None:
    """Copy the counts of cached prompt tokens from the first engine's `accepted` into `usage`.

    A later engine would also count earlier output tokens, because it receives them as part of its
    prompt.
    """
    usage.cached_tokens = accepted.cached_tokens
    del usage.cached_by_tier[:]
    usage.cached_by_tier.extend(accepted.cached_by_tier)


def check_ending(finished: pb.Finished | pb.SampleFinished) -> None:
    """Check that the engine did not cut the answer short because it is stopping.

    Raises:
        ServiceError: UNAVAILABLE, another engine should continue the answer.
    """
    if finished.reason == pb.FINISH_REASON_CANCELLED:
        raise ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "DRAINING",
            "the answer broke off: the engine is stopping and cancelled it",
            retry_after_s=1,
        )


def _begins_anew(engine: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        "CONTINUATION_UNKNOWN",
        f"engine {engine} cannot continue another engine's answer; update it",
    )
