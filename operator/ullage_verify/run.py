"""Runs scenarios against a server, one after the other."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ullage_verify.criteria import Checks, Criterion
from ullage_verify.scenarios import inject, large, oom, overload, shift, soak, streams
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target

Scenario = Callable[[Target, ScenarioSettings, Checks], Awaitable[None]]

SCENARIOS: Mapping[str, Scenario] = {
    "streams": streams.run,
    "overload": overload.run,
    "oom": oom.run,
    "large": large.run,
    "shift": shift.run,
    "soak": soak.run,
    "inject": inject.run,
}
"""All scenarios in the order in which they run. Those that may crash a server come last."""


@dataclass
class VerifyReport:
    """The outcome of a run: the server, and all criteria with their verdicts."""

    url: str = ""
    model: str = ""
    context: int = 0
    criteria: list[Criterion] = field(default_factory=list)
    figures: dict[str, Mapping[str, object]] = field(default_factory=dict)
    """Measured values without a limit, by scenario."""
    seconds: float = 0.0
    is_complete: bool = False
    """Whether all scenarios ran to their end."""

    @property
    def num_failed(self) -> int:
        return sum(criterion.verdict == "failed" for criterion in self.criteria)

    def count(self, verdict: str) -> int:
        """Return how many criteria have the given verdict."""
        return sum(criterion.verdict == verdict for criterion in self.criteria)


async def verify(
    target: Target,
    names: Sequence[str],
    settings: ScenarioSettings,
    show: Callable[[Criterion], None],
    report: VerifyReport,
) -> None:
    """Run scenarios against a server, and add every criterion to a report.

    If the call is cancelled, the report has the criteria whose verdict is known by then.

    Args:
        target: the server.
        names: keys of SCENARIOS.
        settings: options of the scenarios.
        show: called with each criterion as soon as its verdict is known.
        report: the report to fill.
    """
    began = time.monotonic()
    for name in names:
        checks = Checks(name, show)
        try:
            await SCENARIOS[name](target, settings, checks)
        finally:
            report.criteria += checks.criteria
            report.figures[name] = checks.figures
            report.seconds = time.monotonic() - began
    report.is_complete = True
