"""The outcomes that are kept in the repository, and the two tables that are written from them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

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
_ALL_SERVED = re.compile(r"((\d+) of \2: )?200|")


@dataclass(frozen=True)
class Recorded:
    """An outcome, and the processor on which it was seen."""

    outcome: Outcome
    processor: str


def load(text: str) -> Sequence[Recorded]:
    """Return the outcomes of a results file."""
    names = {each.name for each in fields(Outcome)}
    return [
        Recorded(
            Outcome(**{name: value for name, value in row.items() if name in names}),
            row["processor"],
        )
        for row in json.loads(text)
    ]


def dump(recorded: Sequence[Recorded]) -> str:
    """Return the text of a results file."""
    rows = [{**asdict(each.outcome), "processor": each.processor} for each in recorded]
    return json.dumps(rows, indent=1) + "\n"


def merge(before: Sequence[Recorded], new: Sequence[Recorded]) -> Sequence[Recorded]:
    """Return all outcomes in the order of the tables. New ones replace those of the same cell."""
    cells = {(each.outcome.case, each.outcome.server): each for each in [*before, *new]}
    places = {name: place for place, name in enumerate(CASES)}
    servers = list(SERVERS)

    def place(each: Recorded) -> tuple[int, int, str]:
        name = each.outcome.server
        column = servers.index(name) if name in SERVERS else len(servers)
        return places[each.outcome.case], column, name

    return sorted(cells.values(), key=place)


def readme_table(recorded: Sequence[Recorded]) -> str:
    """Return the README's table: the reported cases, with a column for each server."""
    seen = {(each.outcome.case, each.outcome.server): each.outcome for each in recorded}
    rows = [
        [
            f"{case.about} ({case.report})",
            f"`{name}`",
            *(_cell(seen.get((name, server))) for server in TITLES),
        ]
        for name, case in CASES.items()
        if case.report
    ]
    return markdown(["what happens (report)", "`CASE`", *TITLES.values()], rows)


def figures_table(recorded: Sequence[Recorded]) -> str:
    """Return the table with every outcome and its figures."""
    rows = [[*each.outcome.cells, each.processor] for each in recorded]
    head = ["case", "server", "who caused it", "bystanders", "afterwards", "processor"]
    return markdown(head, rows)


def _cell(outcome: Outcome | None) -> str:
    """Return in a few words what other clients saw."""
    if outcome is None:
        return NOT_SEEN
    if outcome.skipped:
        return outcome.skipped

    word = f"**{outcome.word}**" if outcome.server == OURS and outcome.is_well else outcome.word
    if _ALL_SERVED.fullmatch(outcome.cause):
        return word
    return f"{outcome.cause}, {word}"


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
    recorded = merge(before, [Recorded(each, processor) for each in outcomes])
    RESULTS.write_text(dump(recorded), encoding="utf-8")
    write_tables(recorded)
