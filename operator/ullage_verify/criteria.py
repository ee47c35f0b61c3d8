"""The criteria that a server must meet, and a collector of their outcomes during a run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "skipped"]
"""Outcome of a criterion. If a criterion is skipped, its `seen` is the reason."""


@dataclass(frozen=True)
class Criterion:
    """One checked property of a server, with its limit, the observed value and the verdict."""

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
        show: called with each criterion as soon as its verdict is known.
    """

    def __init__(self, scenario: str, show: Callable[[Criterion], None]) -> None:
        self.criteria: list[Criterion] = []
        self.figures: dict[str, object] = {}
        """Measured values without a limit, for the JSON report."""
        self._scenario = scenario
        self._show = show

    def holds(self, name: str, is_true: bool, limit: str, seen: str) -> None:
        """Add a criterion that passes if `is_true`, and fails otherwise."""
        self._add(name, limit, seen, "passed" if is_true else "failed")

    def at_most(self, name: str, value: float, limit: float, unit: str = "s") -> None:
        """Add a criterion that passes if the value is at most the limit."""
        self.holds(name, value <= limit, f"≤ {limit:.4g} {unit}", f"{value:.4g} {unit}")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Add a criterion that passes if the value is at least the limit."""
        self.holds(name, value >= limit, f"≥ {limit:.4g} {unit}", f"{value:.4g} {unit}".rstrip())

    def skip(self, name: str, reason: str) -> None:
        """Record that a criterion cannot be checked on this server or with these options."""
        self._add(name, "", reason, "skipped")

    def _add(self, name: str, limit: str, seen: str, verdict: Verdict) -> None:
        criterion = Criterion(self._scenario, name, limit.rstrip(), seen, verdict)
        self.criteria.append(criterion)
        self._show(criterion)
