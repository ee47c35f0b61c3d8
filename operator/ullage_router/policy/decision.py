"""The record of the router's decision about a request.

Admission writes a `Decision`. Records, headers, logs and gRPC's trailing metadata are derived from
it. A `Decision` is immutable, so each step that admission takes creates a new `Decision`.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ullage.inference.v1 import inference_pb2

KEPT_STEPS = 12
"""Maximum number of steps in a decision's trail. If there are more, middle steps are dropped."""
MIB = 1 << 20

Outcome = Literal["served", "fallback", "escalated", "refused", "failed", "slow", "lost"]
"""The outcome of an attempt to answer with one step of a cascade.

served     the client received this step's answer
fallback   the client received this step's answer because the larger model's engines are busy
escalated  the confidence in the first tokens was too low
refused    the step's engines can never accept such a request, or could not at the time
failed     the answer broke off before any of it was sent to the client
slow       too few tokens arrived within the time allotted to the step
lost       the step was started in parallel, and its answer was not needed
"""

ANSWERED = frozenset({"served", "fallback"})


class Attempt(msgspec.Struct, frozen=True):
    """An attempt to answer a request with one step of a cascade."""

    step: str
    outcome: Outcome
    model: str = ""
    """Name of the model that ran the step (empty if unknown)."""
    confidence: float | None = None
    """Geometric mean probability of the answer's first tokens, or None if unknown."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Number of tokens that had arrived when the attempt was discarded."""
    reason: str = ""
    """Reason of the error that ended the attempt (empty if there was no error)."""

    @property
    def discarded_tokens(self) -> int:
        """Number of completion tokens that were discarded (0 for the attempt that answered)."""
        return 0 if self.outcome in ANSWERED else self.completion_tokens

    def to_wire(self) -> inference_pb2.CascadeAttempt:
        """Return the attempt as a protobuf message of the API."""
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
        """Return the attempt as JSON for the log."""
        return {
            "step": self.step,
            "model": self.model,
            "outcome": self.outcome,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "completion_tokens": self.completion_tokens,
            "reason": self.reason,
        }


class Decision(msgspec.Struct, frozen=True):
    """A snapshot of the router's decision about a request."""

    action: str = ""
    """The action: accept, shrink, queue, route4 or reject (empty until a decision is made)."""
    pool: str = ""
    """The pool to which the decision applies (empty if another router decided)."""
    route: str = ""
    """The pool's label in headers, logs and metrics, from `route_of`."""
    reason: str = ""
    engine: str = ""
    side: str = ""
    """The engine's role in a rollout: stable or canary (empty until an engine is chosen)."""
    revision: str = ""
    """Revision of the engine (empty if unknown)."""
    model: str = ""
    """Name of the model that serves the request."""
    prompt_tokens: int = 0
    predicted_bytes: int | None = None
    """Predicted KV bytes of the request, or None before the prediction."""
    available_bytes: int | None = None
    """KV bytes available on the chosen engine or the pool's freest one, or None if unknown."""
    degraded: tuple[str, ...] = ()
    """Changes that were made to the request, such as `max_tokens=64`."""
    trail: tuple[str, ...] = ()
    """Steps taken with their reasons, such as `queue=KV_HEADROOM`, oldest first."""
    queued_s: float = 0.0
    """Seconds that the request waited for memory."""
    attempts: tuple[Attempt, ...] = ()
    """Cascade steps that were tried."""
    coalesced_with: str = ""
    """Id of the earlier request whose answer this request shares (empty if it shares none)."""

    @property
    def lowered_limit(self) -> str:
        """The lowered output limit, such as `max_tokens=64` (empty if it was not lowered)."""
        return next((word for word in self.degraded if word.startswith("max_tokens=")), "")

    @property
    def predicted_mib(self) -> float:
        """Predicted KV size in MiB (0 before the prediction)."""
        return round((self.predicted_bytes or 0) / MIB, 3)

    @property
    def explanation(self) -> dict[str, str]:
        """The action, the route and the trail of steps, to attach to an error as metadata.

        The result is empty if there is no decision yet.
        """
        if not self.action:
            return {}
        return {"action": self.action, "route": self.route, "trail": ", ".join(self.trail)}

    def next_trail(self, step: str, reason: str) -> tuple[str, ...]:
        """Return the trail, which lists the steps taken so far, with a step appended.

        If the trail becomes too long, `...` replaces its middle steps.
        """
        trail = (*self.trail, f"{step}={reason}")
        return trail if len(trail) <= KEPT_STEPS else (*trail[: KEPT_STEPS - 2], "...", trail[-1])

    def after(self, step: str, reason: str) -> "Decision":
        """Return the decision with a step appended to its trail."""
        return msgspec.structs.replace(self, trail=self.next_trail(step, reason))

    def lowered(self, changes: Iterable[str]) -> "Decision":
        """Return the decision after the engine has lowered the request's limits further.

        Args:
            changes: lowered limits, such as `max_tokens=64`. Each replaces an earlier one of the
                same name.
        """
        degraded = self.degraded
        for change in changes:
            name = change.partition("=")[0]
            degraded = (*(old for old in degraded if old.partition("=")[0] != name), change)

        if not degraded or self.action != "accept":
            return msgspec.structs.replace(self, degraded=degraded)
        return msgspec.structs.replace(
            self,
            degraded=degraded,
            action="shrink",
            reason="PRESSURE",
            trail=self.next_trail("engine", "PRESSURE"),
        )


UNDECIDED = Decision()


def route_of(pool: str, tensor: int, pipeline: int) -> str:
    """Return the label of a pool in headers, logs and metrics.

    If a model has both tensor ranks and pipeline stages, the label is its parallel layout, such as
    tp2pp2. Otherwise the label is the pool's name.
    """
    return f"tp{tensor}pp{pipeline}" if tensor > 1 and pipeline > 1 else pool


def attempts_header(attempts: Iterable[Attempt]) -> str:
    """Format attempts as a structured-field dictionary (RFC 9651).

    For example: `small=escalated;confidence=0.412, big=served`.
    """
    return ", ".join(map(_header_entry, attempts))


def _header_entry(attempt: Attempt) -> str:
    confidence = "" if attempt.confidence is None else f";confidence={attempt.confidence:.3f}"
    return f"{attempt.step}={attempt.outcome}{confidence}"
