"""Boost off: how much smaller the batch is while GPUs are throttled, decided purely.

Slowing down is what the driver does to a GPU that is too hot or is not given enough power. Fewer
sequences at once draw less, and clocks come back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ullage_common.config.engine import ThrottlingSection

MAX_GAP_S = 2.0
"""The time between two samples counts as no more than this: nobody knows what was in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostState:
    """What was decided so far."""

    batch_share: float = 1.0
    """Share of the largest batch that may run; below 1 boost is off."""
    reasons: frozenset[str] = frozenset()
    """Reasons why it shrank, since it was 1."""
    throttled_s: float = 0.0
    """Seconds of throttling that are not made up for by as many without, since the last step."""
    clear_s: float = 0.0
    """Seconds without throttling, up to now, since the last step."""

    @property
    def is_off(self) -> bool:
        """Whether boost is off."""
        return self.batch_share < 1.0


def counted_reasons(
    section: ThrottlingSection, gpus: Iterable[frozenset[str] | None]
) -> frozenset[str] | None:
    """Return the reasons that count of all GPUs together, since they compute at the pace of the
    slowest; None: the driver says nothing."""
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

    Throttling that comes and goes adds up, as long as it is there more often than not; growing
    again takes a time without any. While nobody knows, everything stays as it is.

    Args:
        reasons: those that count now, of `counted_reasons`.
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
