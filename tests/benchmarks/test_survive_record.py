"""The recorded outcomes of survival, and the tables that are written from them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.survive import benchmark, record
from benchmarks.survive.outcome import Outcome

SEEN = Outcome("ullage", "logprobs", cause="2 of 2: 200", whole=3, other_words=0, back_s=0.1)


def recorded_of(outcome: Outcome, processor: str = "a processor") -> record.Recorded:
    return record.Recorded(outcome.case, outcome.server, processor, outcome)


def test_recorded_outcomes_replace_those_of_the_same_cell() -> None:
    first = recorded_of(replace(SEEN, cause="400"))
    earlier = record.Recorded("logprobs", "llama.cpp", "a processor", words="goes on")
    again = recorded_of(SEEN, "another processor")
    merged = record.merge([first, earlier], [again])
    assert merged == [earlier, again]
    assert record.load(record.dump(merged)) == merged


def test_the_readmes_table_has_a_cell_for_each_server() -> None:
    gone = replace(SEEN, server="vllm", cause="500", broken=3, whole=0, back_s=None)
    absent = replace(SEEN, case="adapters", skipped="no adapter")
    recorded = [recorded_of(each) for each in (SEEN, gone, absent)]
    recorded.append(record.Recorded("logprobs", "llama.cpp", "a processor", words="goes on"))
    rows = {
        cells[2]: cells[3:-1]
        for line in record.readme_table(recorded).splitlines()
        if (cells := [cell.strip() for cell in line.split("|")])
    }
    assert rows["`logprobs`"] == ["goes on", "500, all break off, server gone", "—", "**goes on**"]
    assert "`adapters`" not in rows, "it was not seen with any server"
    assert "`kill`" not in rows, "nobody has reported it"


@pytest.mark.parametrize(
    ("cause", "broken", "cell"),
    [
        ("24 of 24: 200", 0, "goes on"),
        ("24 of 24: broken", 3, "all break off"),
        ("13 of 24: 500, 11 of 24: broken", 3, "500, all break off"),
        ("2 of 24: 200, 22 of 24: broken", 0, "broken, goes on"),
        ("400", 0, "400, goes on"),
        ("", 0, "goes on"),
    ],
)
def test_a_cell_tells_each_kind_of_answer_once(cause: str, broken: int, cell: str) -> None:
    seen = replace(SEEN, server="vllm", cause=cause, broken=broken, whole=3 - broken)
    assert recorded_of(seen).cell == cell


@pytest.mark.parametrize(
    ("path", "table"),
    [(record.README, record.readme_table), (record.FIGURES, record.figures_table)],
)
def test_the_pages_have_the_recorded_tables(
    path: Path, table: Callable[[Sequence[record.Recorded]], str]
) -> None:
    recorded = record.load(record.RESULTS.read_text())
    page = path.read_text()
    assert record.between_marks(page, table(recorded)) == page, (
        "write it with python -m benchmarks survive --record"
    )


def test_a_page_without_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="lacks"):
        record.between_marks("no table", "| a |")


def test_quick_outcomes_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([str(tmp_path), "--quick", "--record"])
