"""Pure functions that reduce the batch size while GPUs are throttled.

The driver throttles a GPU that is too hot or has too little power. A smaller batch draws less
power, which lets the clocks recover. Boost is said to be off while the batch size is reduced.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ullage_common.config.engine import ThrottlingSection

MAX_GAP_S = 2.0
"""Maximum number of seconds between two samples that count towards throttled or unthrottled time.

The state of a GPU between samples is unknown, so longer gaps are capped at this value.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostState:
    """The fraction of the batch that may run, and the timers that decide when to change it."""

    batch_share: float = 1.0
    """Fraction of the largest batch that may run. Boost is off if this is below 1."""
    reasons: frozenset[str] = frozenset()
    """All throttle reasons that have led to reductions since the fraction was last 1."""
    throttled_s: float = 0.0
    """Throttled minus unthrottled seconds since the fraction last changed, never below 0."""
    clear_s: float = 0.0
    """Seconds since GPUs were last throttled or the fraction last changed."""

    @property
    def is_off(self) -> bool:
        """Whether boost is off, which means that only a fraction of the largest batch may run."""
        return self.batch_share < 1.0


def counted_reasons(
    section: ThrottlingSection, gpus: Iterable[frozenset[str] | None]
) -> frozenset[str] | None:
    """Return the union of all GPUs' throttle reasons, because the slowest GPU sets the pace.

    Power capping is ignored unless the rules include it. Return None if the driver provides no
    reasons.
    """
    reported = [reasons for reasons in gpus if reasons is not None]
    if not reported:
        return None
    ignored = frozenset() if section.power_cap else frozenset({"power_cap"})
    return frozenset().union(*reported) - ignored


def advance(
    section: ThrottlingSection,
    state: BoostState,
    reasons: frozenset[str] | None,
    elapsed_s: float,
) -> BoostState:
    """Update the allowed batch size from a new sample, and return the new state.

    If GPUs have been throttled long enough, the batch shrinks. Intermittent throttling has the same
    effect if GPUs are throttled more than half of the time, because the time without throttling is
    subtracted. After enough time without throttling, the batch grows again. While the reasons are
    unknown, the batch never shrinks, and grows again as without throttling.

    Args:
        section: the configured rules.
        state: the state before the sample.
        reasons: the current reasons, from `counted_reasons`.
        elapsed_s: seconds since the last sample.
    """
    elapsed_s = min(elapsed_s, MAX_GAP_S)
    if reasons:
        throttled_s = state.throttled_s + elapsed_s
        state = replace(state, throttled_s=throttled_s, clear_s=0.0)
        return _shrunk(section, state, reasons) if throttled_s >= section.after else state
    throttled_s = max(0.0, state.throttled_s - elapsed_s)
    state = replace(state, throttled_s=throttled_s, clear_s=state.clear_s + elapsed_s)
    return _grown(section, state) if state.clear_s >= section.recover_after else state


def _shrunk(section: ThrottlingSection, state: BoostState, reasons: frozenset[str]) -> BoostState:
    share = max(section.min_batch_share, round(state.batch_share - section.batch_step, 6))
    all_reasons = state.reasons | reasons if share < 1.0 else frozenset[str]()
    return BoostState(batch_share=share, reasons=all_reasons)


def _grown(section: ThrottlingSection, state: BoostState) -> BoostState:
    share = min(1.0, round(state.batch_share + section.batch_step, 6))
    return BoostState(batch_share=share, reasons=state.reasons if share < 1.0 else frozenset())
