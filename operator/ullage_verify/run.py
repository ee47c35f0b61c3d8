"""Runs scenarios against a server, one after the other."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of a run: the server, and all criteria with their verdicts."""

    url: str
    model: str
    context: int
    criteria: Sequence[Criterion]
    figures: Mapping[str, Mapping[str, object]]
    """Measured values without a limit, by scenario."""
    seconds: float

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
) -> VerifyReport:
    """Run scenarios against a server, and return a report with every criterion.

    Args:
        target: the server.
        names: keys of SCENARIOS.
        settings: options of the scenarios.
        show: called with each criterion as soon as its verdict is known.
    """
    began = time.monotonic()
    criteria: list[Criterion] = []
    figures: dict[str, Mapping[str, object]] = {}
    for name in names:
        checks = Checks(name, show)
        await SCENARIOS[name](target, settings, checks)
        criteria += checks.criteria
        figures[name] = checks.figures

    return VerifyReport(
        url=target.client.url,
        model=target.model,
        context=target.context,
        criteria=criteria,
        figures=figures,
        seconds=time.monotonic() - began,
    )
