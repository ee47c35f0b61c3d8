"""The outcomes that are kept in the repository, and the two tables that are written from them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.survive.cases import CASES
from benchmarks.survive.outcome import Outcome, markdown
from benchmarks.survive.servers import SERVERS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "reasons" / "benchmarks.md"

BEGIN = "<!-- Written by python -m benchmarks survive --record. -->\n"
END = "\n<!-- End of the written part. -->"
NOT_SEEN = "—"
TITLES: Mapping[str, str] = {
    "llama.cpp": "llama.cpp",
    "vllm": "`vllm serve` 0.32",
    "ullage+vllm": "Ullage with vLLM",
    "ullage": "Ullage",
}
OURS = "ullage"
SERVED = "200"
BROKEN = "broken"
"""How an answer that broke off is called among statuses."""
_COUNT = re.compile(r"\d+ of \d+: ")


@dataclass(frozen=True)
class Recorded:
    """What was seen in one case with one server."""

    case: str
    server: str
    processor: str
    outcome: Outcome | None = None
    """The outcome, or None if it was seen before outcomes were recorded."""
    words: str = ""
    """What was seen before outcomes were recorded, in a few words."""

    @property
    def cell(self) -> str:
        """What other clients saw, in a few words."""
        return _cell(self.outcome) if self.outcome else self.words

    @property
    def cells(self) -> list[str]:
        """The row of the table with all figures."""
        own = self.outcome.cells if self.outcome else [self.case, self.server, "", self.words, ""]
        return [*own, self.processor]


def load(text: str) -> Sequence[Recorded]:
    """Return the outcomes of a results file."""
    return msgspec.json.decode(text, type=list[Recorded])


def dump(recorded: Sequence[Recorded]) -> str:
    """Return the text of a results file."""
    text = msgspec.json.format(msgspec.json.encode(recorded), indent=1)
    return text.decode() + "\n"


def merge(before: Sequence[Recorded], new: Sequence[Recorded]) -> Sequence[Recorded]:
    """Return all outcomes in the order of the tables. New ones replace those of the same cell."""
    cells = {(each.case, each.server): each for each in [*before, *new]}
    places = {name: place for place, name in enumerate(CASES)}
    servers = list(SERVERS)

    def place(each: Recorded) -> tuple[int, int, str]:
        column = servers.index(each.server) if each.server in SERVERS else len(servers)
        return places[each.case], column, each.server

    return sorted(cells.values(), key=place)


def readme_table(recorded: Sequence[Recorded]) -> str:
    """Return the README's table: reported cases that were seen, with a column for each server."""
    seen = {(each.case, each.server): each.cell for each in recorded}
    played = {each.case for each in recorded if not (each.outcome and each.outcome.skipped)}
    rows = [
        [
            f"{case.about} ({case.report})",
            f"`{name}`",
            *(seen.get((name, server), NOT_SEEN) for server in TITLES),
        ]
        for name, case in CASES.items()
        if case.report and name in played
    ]
    return markdown(["what happens (report)", "`CASE`", *TITLES.values()], rows)


def figures_table(recorded: Sequence[Recorded]) -> str:
    """Return the table with every outcome and its figures."""
    rows = [each.cells for each in recorded]
    head = ["case", "server", "who caused it", "bystanders", "afterwards", "processor"]
    return markdown(head, rows)


def _cell(outcome: Outcome) -> str:
    """Return in a few words what other clients saw."""
    if outcome.skipped:
        return outcome.skipped

    word = f"**{outcome.word}**" if outcome.server == OURS and not outcome.fault else outcome.word
    # The row with all figures has the numbers of answers, too.
    answers = dict.fromkeys(_COUNT.sub("", outcome.cause).split(", "))
    failures = [each for each in answers if each not in ("", SERVED)]
    if outcome.broken and BROKEN in failures:
        failures.remove(BROKEN)
    return ", ".join([*failures, word])


def between_marks(page: str, table: str) -> str:
    """Return the page with a new table between its marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_tables(recorded: Sequence[Recorded]) -> None:
    """Write both tables into their pages."""
    for path, table in ((README, readme_table(recorded)), (FIGURES, figures_table(recorded))):
        page = path.read_text(encoding="utf-8")
        path.write_text(between_marks(page, table), encoding="utf-8")


def record(outcomes: Sequence[Outcome], processor: str) -> None:
    """Keep outcomes in the repository, and write both tables anew."""
    before = load(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    new = [Recorded(each.case, each.server, processor, each) for each in outcomes]
    recorded = merge(before, new)
    RESULTS.write_text(dump(recorded), encoding="utf-8")
    write_tables(recorded)
