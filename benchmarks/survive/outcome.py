"""What was seen in one case with one server, and the tables of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.survive.cases import CASES, Case

BRIEF_S = 2.0
"""Pauses up to this many seconds are not named in the summary."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    server: str
    case: str
    cause: str = ""
    whole: int = 0
    """Number of streams that ended well."""
    other_words: int | None = None
    """Number of whole streams whose words differ from an undisturbed run.

    None if the words of two undisturbed runs differ, too.
    """
    broken: int = 0
    longest_pause_s: float = 0.0
    back_s: float | None = None
    """Seconds until a new request was answered, or None if that took too long."""
    health: str = ""
    """Status of /health of a server that did not come back."""
    healthy_while_silent_s: float = 0.0
    """Seconds after the last word of a broken stream for which /health was 200."""
    errors: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why the case was not played (empty if it was)."""
    failure: str = ""
    """Why there was no stream to look at, such as a server that does not start (empty if none)."""
    restarts: str = ""
    """What was seen when the server was killed and started again (empty in other cases)."""

    @property
    def fault(self) -> str:
        """Return the promise of Ullage that was broken, in a few words (empty if none was)."""
        if self.skipped:
            return ""
        if self.failure:
            return self.failure
        if self.broken:
            return f"{self.broken} of {self.whole + self.broken} streams broke off"
        if self.other_words:
            return f"{self.other_words} of {self.whole} answers have other words"
        # After restarts nobody is asked again: each restart counts its own answers.
        if self.back_s is None and not self.restarts:
            return "the server never answered again"
        return ""

    @property
    def word(self) -> str:
        """What the streams of others saw, in a few words."""
        if self.skipped:
            return "not played"
        if self.failure or self.restarts:
            return ", ".join(filter(None, (self.failure.partition(":")[0], self.restarts)))
        if self.broken == 0:
            after = f" after {self.longest_pause_s:.0f} s" if self.longest_pause_s > BRIEF_S else ""
            words = " with other words" if self.other_words else ""
            gone = ", server gone" if self.back_s is None else ""
            return f"goes on{after}{words}{gone}"

        count = self.whole + self.broken
        verb = "breaks" if self.broken == 1 else "break"
        some = "all break off" if self.broken == count else f"{self.broken} of {count} {verb} off"
        if any(error.startswith("silent") for error in self.errors):
            some = f"no word for {self.longest_pause_s:.0f} s"
        return some if self.back_s is not None else f"{some}, server gone"

    @property
    def cells(self) -> list[str]:
        if self.skipped or self.failure or self.restarts:
            seen = "; ".join(filter(None, (self.failure, self.restarts)))
            seen = f"not played: {self.skipped}" if self.skipped else seen
            return [self.case, self.server, self.cause or "-", seen, "-"]

        words = " with the same words" if self.whole and self.other_words == 0 else ""
        parts = [f"{self.whole} whole{words}"]
        parts += [f"{self.other_words} with other words"] if self.other_words else []
        parts += [f"{self.broken} broken"] if self.broken else []
        seen = f"{', '.join(parts)}, pause {self.longest_pause_s:.1f} s"

        if self.back_s is None:
            back = f"dead, /health: {self.health}"
        else:
            back = f"answers after {self.back_s:.1f} s"
        if self.healthy_while_silent_s >= 1:
            back += f", 200 during {self.healthy_while_silent_s:.0f} s of silence"
        return [self.case, self.server, self.cause or "-", seen, back]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table, ordered by case."""
    rows = [outcome.cells for outcome in outcomes]
    rows.sort(key=lambda row: list(CASES).index(row[0]))
    return markdown(["case", "server", "who caused it", "bystanders", "afterwards"], rows)


def summary(outcomes: Sequence[Outcome], cases: Mapping[str, Case] = CASES) -> str:
    """Return a Markdown table of what other clients saw, with a column for each server."""
    servers = list(dict.fromkeys(outcome.server for outcome in outcomes))
    seen = {(outcome.case, outcome.server): outcome.word for outcome in outcomes}
    rows = []
    for name, case in cases.items():
        if any((name, server) in seen for server in servers):
            words = [seen.get((name, server), "") for server in servers]
            rows.append([case.about, case.report, f"`{name}`", *words])
    return markdown(["what happens", "report", "case", *servers], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
