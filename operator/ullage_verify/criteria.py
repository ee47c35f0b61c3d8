"""Criteria, their outcomes, and the collection of both during a run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "skipped"]
"""Outcome of a criterion. A skipped one names the reason."""


@dataclass(frozen=True)
class Criterion:
    """One promise, its limit, and the value seen."""

    scenario: str
    name: str
    limit: str
    seen: str
    verdict: Verdict

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class Checks:
    """Collects the criteria of a scenario.

    Args:
        scenario: name of the scenario.
        show: receives every criterion as soon as it is decided.
    """

    def __init__(self, scenario: str, show: Callable[[Criterion], None]) -> None:
        self.criteria: list[Criterion] = []
        self.figures: dict[str, object] = {}
        """Measured values without a limit, for the JSON report."""
        self._scenario = scenario
        self._show = show

    def holds(self, name: str, is_true: bool, limit: str, seen: str) -> None:
        """Add a criterion that is passed if `is_true`."""
        self._add(name, limit, seen, "passed" if is_true else "failed")

    def at_most(self, name: str, value: float, limit: float, unit: str = "s") -> None:
        """Add a criterion that is passed if the value is not above the limit."""
        self.holds(name, value <= limit, f"≤ {limit:.4g} {unit}", f"{value:.4g} {unit}")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Add a criterion that is passed if the value is not below the limit."""
        self.holds(name, value >= limit, f"≥ {limit:.4g} {unit}", f"{value:.4g} {unit}".rstrip())

    def skip(self, name: str, reason: str) -> None:
        """Add a criterion that this server or these options cannot decide."""
        self._add(name, "", reason, "skipped")

    def _add(self, name: str, limit: str, seen: str, verdict: Verdict) -> None:
        criterion = Criterion(self._scenario, name, limit.rstrip(), seen, verdict)
        self.criteria.append(criterion)
        self._show(criterion)
