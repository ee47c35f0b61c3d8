"""What became of each step that was tried for a request."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ullage.inference.v1 import inference_pb2

Outcome = Literal["served", "fallback", "escalated", "refused", "failed", "slow", "lost"]
"""served     its answer is the answer
fallback   its answer is the answer because the larger model's engines are busy
escalated  its first tokens were too unsure
refused    it took no such request, or none now
failed     it broke off before its answer was let go
slow       it had not enough tokens in its share of the time
lost       begun in parallel and not needed"""

ANSWERED = frozenset({"served", "fallback"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One step that was tried."""

    step: str
    outcome: Outcome
    model: str = ""
    """As the step calls it; empty when it never said."""
    confidence: float | None = None
    """Geometric mean probability of the tokens that were judged."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of an attempt that was thrown away, as far as they had arrived."""
    reason: str = ""
    """Of the error that ended it."""

    @property
    def discarded_tokens(self) -> int:
        """Completion tokens that nobody will read."""
        return 0 if self.outcome in ANSWERED else self.completion_tokens

    def to_wire(self) -> inference_pb2.CascadeAttempt:
        return inference_pb2.CascadeAttempt(
            step=self.step,
            model=self.model,
            outcome=self.outcome,
            confidence=self.confidence,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            reason=self.reason,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "model": self.model,
            "outcome": self.outcome,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "completion_tokens": self.completion_tokens,
            "reason": self.reason,
        }


def header(attempts: Iterable[Attempt]) -> str:
    """`small=escalated;confidence=0.412, big=served`, which is a structured field's dictionary."""
    return ", ".join(map(_entry, attempts))


def _entry(attempt: Attempt) -> str:
    more = "" if attempt.confidence is None else f";confidence={attempt.confidence:.3f}"
    return f"{attempt.step}={attempt.outcome}{more}"
