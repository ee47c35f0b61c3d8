"""The results of clients: read from programs' lines, kept in a file, shown as a table."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ullage_clients.catalogue import ClientError, JudgedClient

SEEN_LENGTH = 300
"""Number of characters that are kept of what a check saw."""
NOT_SEEN = "not seen yet"
HEAD = "| client | version | passes | fails |\n| --- | --- | --- | --- |"


@dataclass(frozen=True)
class Check:
    """The result of one check, with what it saw: an answer's facts, or the error."""

    passed: bool
    seen: str


@dataclass(frozen=True)
class Result:
    """The result of one client.

    version
        of the client that was judged
    packages
        the pinned versions that it was judged with, by package
    not_installed
        reason why it could not be judged (empty if it was)
    checks
        by name, all that the catalogue names
    """

    version: str
    packages: Mapping[str, str]
    not_installed: str = ""
    checks: Mapping[str, Check] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the client was judged, and every check passed."""
        return bool(self.checks) and not self.failures

    @property
    def failures(self) -> dict[str, Check]:
        return {name: check for name, check in self.checks.items() if not check.passed}


def parse_line(line: str) -> tuple[str, Check] | None:
    """Return the name and the result that a program's line states, or None for another line."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or set(value) != {"check", "passed", "seen"}:
        return None
    seen = " ".join(str(value["seen"]).split())
    return str(value["check"]), Check(value["passed"] is True, seen[:SEEN_LENGTH])


def judge(client: JudgedClient, lines: Iterable[str], ending: str) -> dict[str, Check]:
    """Return the result of each check that the catalogue names, in its order.

    A check without a line has failed, and so has a line that the catalogue does not name: the
    table would not show it.

    Args:
        client: the client.
        lines: output of its program.
        ending: how the program ended, for checks without a line.
    """
    stated: dict[str, Check] = {}
    for line in lines:
        if parsed := parse_line(line):
            name, check = parsed
            repeated = Check(False, f"the program states {name} twice")
            stated[name] = repeated if name in stated else check

    silent = Check(False, f"no result: the program {ending}")
    checks = {name: stated.pop(name, silent) for name in client.checks}
    for name in stated:
        checks[name] = Check(False, "the catalogue has no such check")
    return checks


def to_json(results: Mapping[str, Result]) -> str:
    """Return the text of a file of results."""
    clients = {
        name: {
            "version": result.version,
            "packages": dict(result.packages),
            "not_installed": result.not_installed,
            "checks": {
                name: {"passed": check.passed, "seen": check.seen}
                for name, check in result.checks.items()
            },
        }
        for name, result in results.items()
    }
    return json.dumps({"clients": clients}, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> dict[str, Result]:
    """Read a file of results.

    Raises:
        ClientError: the text is no such file.
    """
    try:
        clients: dict[str, Any] = json.loads(text)["clients"]
        return {
            name: Result(
                version=value["version"],
                packages=value["packages"],
                not_installed=value["not_installed"],
                checks={key: Check(**check) for key, check in value["checks"].items()},
            )
            for name, value in clients.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClientError(f"no file of results ({error!r}); write one with --record") from None


def merge(
    old: Mapping[str, Result], new: Mapping[str, Result], names: Iterable[str]
) -> dict[str, Result]:
    """Return the newest judged result of each name, in the order of the names.

    A client that could not be installed keeps the result that another machine recorded.
    """
    judged = {name: result for name, result in new.items() if not result.not_installed}
    newest = {**old, **judged}
    return {name: newest[name] for name in names if name in newest}


def table(
    clients: Iterable[JudgedClient],
    results: Mapping[str, Result],
    packages: Mapping[str, dict[str, str]],
) -> str:
    """Return the table of all clients.

    Args:
        clients: in the table's order.
        results: of clients by name. A result with other versions than the catalogue's does not
            count, and neither does one of other checks.
        packages: the catalogue's versions of each client's packages, by the client's name.
    """
    rows = [HEAD]
    for client in clients:
        result = results.get(client.name)
        if (
            not result
            or dict(result.packages) != packages[client.name]
            or not set(client.checks) <= set(result.checks)
        ):
            rows.append(f"| {client.title} | {client.version} | {NOT_SEEN} | |")
            continue
        passed = [name for name, check in result.checks.items() if check.passed]
        count = "all" if result.passed else f"{len(passed)} of"
        shown = f"{count} {len(result.checks)}: {', '.join(passed)}" if passed else "none"
        failed = "; ".join(f"{name}: {cell(check)}" for name, check in result.failures.items())
        rows.append(f"| {client.title} | {result.version} | {shown} | {failed} |")
    return "\n".join(rows)


def cell(check: Check) -> str:
    """Return what a check saw, as a cell of a table takes it."""
    return check.seen.replace("|", "\\|").replace("<", "&lt;")


def summary(results: Mapping[str, Result]) -> str:
    """Return one line that counts the results, and names all that did not pass."""
    passed = [name for name, result in results.items() if result.passed]
    failed = {name: result.failures for name, result in results.items() if result.failures}
    absent = [name for name, result in results.items() if result.not_installed]

    parts = [f"{len(passed)} passed"]
    if failed:
        named = ", ".join(f"{name} ({', '.join(checks)})" for name, checks in failed.items())
        parts.append(f"{len(failed)} failed: {named}")
    if absent:
        parts.append(f"{len(absent)} not installed: {', '.join(absent)}")
    return "; ".join(parts)
