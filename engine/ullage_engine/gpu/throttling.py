"""Pure functions that reduce the batch while GPUs are throttled (boost off).

The driver throttles a GPU that is too hot or has too little power. A smaller batch draws less
power, so that the clocks recover.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ullage_common.config.engine import ThrottlingSection

MAX_GAP_S = 2.0
"""Maximum number of seconds that are counted between two samples, because the state of a GPU
between samples is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostState:
    """The current batch share, and the measurements for its next change."""

    batch_share: float = 1.0
    """Fraction of the largest batch that may run. Boost is off if this fraction is below 1."""
    reasons: frozenset[str] = frozenset()
    """Reasons why the share has been reduced since it was 1."""
    throttled_s: float = 0.0
    """Seconds with throttling minus seconds without, at least 0, since the share last changed."""
    clear_s: float = 0.0
    """Seconds since GPUs were last throttled or the share last changed."""

    @property
    def is_off(self) -> bool:
        """Whether boost is off, so that only a fraction of the largest batch may run."""
        return self.batch_share < 1.0


def counted_reasons(
    section: ThrottlingSection, gpus: Iterable[frozenset[str] | None]
) -> frozenset[str] | None:
    """Return the union of the GPUs' throttle reasons, because the slowest GPU sets the pace.

    Return None if the driver provides no reasons.
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
    """Return the state after a sample.

    Intermittent throttling adds up if GPUs are throttled for more than half of the time. The batch
    grows again after a time without throttling. The state stays as it is while the reasons are
    unknown.

    Args:
        section: the configured rules.
        state: the state before the sample.
        reasons: the current reasons, from `counted_reasons`.
        elapsed_s: seconds since the last sample.
    """
    if reasons is None:
        return state
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
