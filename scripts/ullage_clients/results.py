"""The results of clients: read from programs' lines, kept in a file, shown as a table."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ullage_clients.catalogue import OWN_WORDS, ClientError, JudgedClient, ServerName

SEEN_LENGTH = 300
"""Number of characters that are kept of what a check saw."""
NOT_SEEN = "not seen yet"
NOT_TRIED = "not tried"
HEAD = "| client | version | passes | fails | vLLM {version} |\n| --- | --- | --- | --- | --- |"
NOTE = "*"
"""Mark of a check in OWN_WORDS that vLLM's own server fails."""


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
    server_version
        of the server that it was judged against (empty for Ullage)
    not_installed
        reason why it could not be judged (empty if it was)
    checks
        by name, all that the catalogue names
    """

    version: str
    packages: Mapping[str, str]
    server_version: str = ""
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


Results = Mapping[str, Result]
"""Results of one server, by the client's name."""


def to_json(results: Mapping[ServerName, Results]) -> str:
    """Return the text of a file of results."""
    servers = {
        server: {name: asdict(result) for name, result in clients.items()}
        for server, clients in results.items()
    }
    return json.dumps(servers, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> dict[ServerName, dict[str, Result]]:
    """Read a file of results.

    Raises:
        ClientError: the text is no such file.
    """
    try:
        servers: dict[str, dict[str, Any]] = json.loads(text)
        return {
            ServerName(server): {name: _result(value) for name, value in clients.items()}
            for server, clients in servers.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClientError(f"no file of results ({error!r}); write one with --record") from None


def _result(value: Mapping[str, Any]) -> Result:
    checks = {name: Check(**check) for name, check in value["checks"].items()}
    return Result(**{**value, "checks": checks})


def merge(old: Results, new: Results, names: Iterable[str]) -> dict[str, Result]:
    """Return the newest judged result of each name, in the order of the names.

    A client that could not be installed keeps the result that another machine recorded.
    """
    judged = {name: result for name, result in new.items() if not result.not_installed}
    newest = {**old, **judged}
    return {name: newest[name] for name in names if name in newest}


@dataclass(frozen=True)
class Pins:
    """The versions that a result must have been judged with.

    packages
        of each client, by its name
    vllm
        version of vLLM's own server
    """

    packages: Mapping[str, Mapping[str, str]]
    vllm: str

    def current(
        self, results: Mapping[ServerName, Results], server: ServerName, client: JudgedClient
    ) -> Result | None:
        """Return a client's result, or None if it is absent or has other versions or checks."""
        result = results.get(server, {}).get(client.name)
        version = self.vllm if server == ServerName.VLLM else ""
        if (
            not result
            or result.server_version != version
            or dict(result.packages) != self.packages[client.name]
            or not set(client.checks) <= set(result.checks)
        ):
            return None
        return result


def table(
    clients: Iterable[JudgedClient], results: Mapping[ServerName, Results], pins: Pins
) -> str:
    """Return the table of all clients, in their order. Only current results count."""
    rows = [HEAD.format(version=pins.vllm)]
    for client in clients:
        ours = pins.current(results, ServerName.ULLAGE, client)
        theirs = vllm_cell(pins.current(results, ServerName.VLLM, client))
        if not ours:
            rows.append(f"| {client.title} | {client.version} | {NOT_SEEN} | | {theirs} |")
            continue
        passed = [name for name, check in ours.checks.items() if check.passed]
        count = "all" if ours.passed else f"{len(passed)} of"
        shown = f"{count} {len(ours.checks)}: {', '.join(passed)}" if passed else "none"
        failed = "; ".join(
            f"{name}: {cell(check)}{reason(client, name)}" for name, check in ours.failures.items()
        )
        rows.append(f"| {client.title} | {ours.version} | {shown} | {failed} | {theirs} |")
    return "\n".join(rows)


def reason(client: JudgedClient, check: str) -> str:
    """Return the reason that the catalogue states for a failed check, as a cell ends with it."""
    return f" ({client.reasons[check]})" if check in client.reasons else ""


def vllm_cell(result: Result | None) -> str:
    """Return how vLLM's own server does with a client, as a cell of the table."""
    if not result:
        return NOT_TRIED
    if result.passed:
        return f"all {len(result.checks)}"
    return "fails " + ", ".join(
        f"{name}{NOTE}" if name in OWN_WORDS else name for name in result.failures
    )


def unexplained(
    clients: Iterable[JudgedClient], results: Mapping[ServerName, Results], pins: Pins
) -> list[str]:
    """Return an error for each check that vLLM's own server passes and Ullage does not.

    A reason in the catalogue explains such a check. A reason that explains no such check is an
    error, too.
    """
    errors = []
    for client in clients:
        theirs = pins.current(results, ServerName.VLLM, client)
        if not theirs:
            continue
        ours = pins.current(results, ServerName.ULLAGE, client)
        passed = {name for name, check in (ours.checks if ours else {}).items() if check.passed}

        for name, check in theirs.checks.items():
            is_behind = check.passed and name not in passed
            if is_behind and name not in client.reasons:
                errors.append(
                    f"{client.name}: {name}: vLLM {pins.vllm} passes, and Ullage "
                    f"{'fails' if ours else 'was not judged'}; repair it, or state in the "
                    "catalogue's `reasons` how the refusal protects memory"
                )
            if name in client.reasons and not is_behind:
                errors.append(
                    f"{client.name}: {name}: the catalogue states a reason, but Ullage is not "
                    "behind vLLM; remove it"
                )
    return errors


def cell(check: Check) -> str:
    """Return what a check saw, as a cell of a table takes it."""
    return check.seen.replace("|", "\\|").replace("<", "&lt;")


def summary(results: Results) -> str:
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
