"""The table of failures in the documentation names criteria and cases that exist."""

import re
from pathlib import Path

from benchmarks.survive.cases import CASES as SURVIVE_CASES

from ullage_verify.faults import PROCESS_FAULT_NAMES
from ullage_verify.scenarios import inject
from ullage_verify.scenarios.oom import CASES

PAGE = Path(__file__).parents[2] / "docs/guide/verify.md"
HEAD = "| failure | report | played by |"


def rows() -> list[tuple[list[str], str, list[str]]]:
    """Return the reports, the scenario and the criteria of each row."""
    table = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0]
    found = []
    for line in table.strip().splitlines()[1:]:
        _, reports, played = (cell.strip() for cell in line.strip("|").split("|"))
        match = re.fullmatch(r"`([a-z ]+)`: (.+)", played)
        assert match, played
        found.append((reports.split(", "), match[1], match[2].split("; ")))
    return found


def test_the_table_has_all_twelve_failures() -> None:
    assert len(rows()) == 12


def test_each_failure_is_played_by_a_criterion_that_exists() -> None:
    names = {
        "oom": {case.name for case in CASES},
        "inject": {*PROCESS_FAULT_NAMES, inject.SHARED_FILES, inject.HEALTH},
        "benchmarks survive": set(SURVIVE_CASES),
    }
    unknown = [
        (scenario, name)
        for _, scenario, criteria in rows()
        for name in criteria
        if name not in names[scenario]
    ]
    assert not unknown


def test_the_cases_of_oom_cite_the_reports_of_the_table() -> None:
    cited = {case.name: set(case.report.split(", ")) for case in CASES if case.report}
    listed = {
        name: set(reports)
        for reports, scenario, criteria in rows()
        if scenario == "oom"
        for name in criteria
    }
    assert listed == cited
