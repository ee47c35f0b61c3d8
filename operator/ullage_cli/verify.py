"""`ullage verify` checks how a running server handles overload, large prompts and faults."""

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from ullage_cli import interruptible
from ullage_cli.port_forward import PortForward
from ullage_cli.processes.state import STATE_FILE, read_state, running_folders
from ullage_cli.server_url import (
    add_report_files,
    add_target,
    check_report_files,
    server_url,
    write_reports,
)
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_verify import report as reports
from ullage_verify.client import SILENCE_S, OpenAIClient
from ullage_verify.criteria import Criterion
from ullage_verify.faults import (
    PROCESS_FAULT_NAMES,
    Fault,
    admin_faults,
    clock_faults,
    disk_faults,
    node_faults,
    pod_faults,
    process_faults,
)
from ullage_verify.processes import ServerProcesses
from ullage_verify.run import SCENARIOS, VerifyReport, verify
from ullage_verify.scenarios.inject import SHARED_FILES
from ullage_verify.scenarios.settings import (
    DEFAULT_E2E_S,
    DEFAULT_GAP_S,
    DEFAULT_LARGE_TOKENS,
    DEFAULT_TTFT_S,
    ScenarioSettings,
)
from ullage_verify.target import TargetError, describe, has_pages

INTERRUPTED = 130
QUIET_INTERVAL_S = 60.0
"""Seconds between two steps that are printed while standard error is no terminal."""

OF_PROCESSES = (*PROCESS_FAULT_NAMES, SHARED_FILES)
"""Faults and criteria of `inject` that only a server on this machine can have."""
NEEDS_PID = "needs --pid, the first process of a server on this machine"

PAGES_TIMEOUT_S = 10.0


class Monitoring(NamedTuple):
    """Addresses of a server's pages for monitoring."""

    url: str
    """Base URL of /stats and /metrics (empty if the API's port has them or they are unknown)."""
    engines: tuple[str, ...] = ()
    """Base URLs of the engines' own /metrics."""


HELP = """scenarios:
  streams    many streams, a slow client, clients that vanish
  overload   sixty large requests at once, whose clients return when they are told to
  oom        requests that end engines elsewhere, beside three streams of other clients
  large      prompts above the threshold, and their route
  shift      short prompts, long ones, and short ones again
  soak       four conversations for some minutes
  inject     faults in the middle of answers (needs a fault such as --pid or --pod)
  all        all of them, in this order

examples:
  ullage verify all http://127.0.0.1:8000
  ullage verify inject http://127.0.0.1:8000 --pid "$(pgrep -of 'ullage up')"
  ullage verify inject http://127.0.0.1:8000 --admin 127.0.0.1:9001 --faults 100 --gap 5
  ullage verify inject http://127.0.0.1:8000 --disk /var/lib/ullage/kv --clock
  ullage verify oom http://127.0.0.1:8080 --context 4096 --json oom.json --svg oom.svg
  ullage verify soak chat --namespace prod --minutes 30
  ullage verify all http://chat.prod:8000 --monitoring http://chat.prod:9090
  ullage verify inject chat --namespace prod --pod chat-single-0 --pod chat-single-1 \
      --pod ullage-system:app.kubernetes.io/component=operator --node node-3 --faults 100

The server may be any that has OpenAI's API. A criterion that the server's pages cannot decide is
skipped with its reason. Set ULLAGE_API_KEY if the server needs a key.

exit status: 0 nothing failed, 1 a criterion failed, 2 an option is wrong or the server does not
answer, 130 interrupted
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage verify`."""
    parser = commands.add_parser(
        "verify",
        help="check what clients of a server see under load and faults",
        description="Check what clients of a running server see under overload and faults.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=(*SCENARIOS, "all"))
    add_target(parser)
    parser.add_argument(
        "--monitoring",
        metavar="URL",
        help="where /stats and /metrics are, if not on the API's port (default: as ullage up or "
        "the SERVICE says)",
    )
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=1.0,
        help="duration of the soak, and of the shift (1)",
    )
    parser.add_argument(
        "--ttft",
        type=seconds,
        metavar="SECONDS",
        help="objective for the first token under overload, p95 (default: the service's own, or "
        f"{DEFAULT_TTFT_S:g})",
    )
    parser.add_argument(
        "--e2e",
        type=seconds,
        metavar="SECONDS",
        help="objective for whole answers in large and soak, p95 (default: the service's own, or "
        f"{DEFAULT_E2E_S:g})",
    )
    parser.add_argument(
        "--gap",
        type=seconds,
        default=DEFAULT_GAP_S,
        metavar="SECONDS",
        help=f"objective for the pauses of streams at a fault in inject ({DEFAULT_GAP_S:g})",
    )
    parser.add_argument(
        "--large-tokens",
        type=positive,
        metavar="TOKENS",
        help="threshold of the pool for large requests (default: the service's own, or "
        f"{DEFAULT_LARGE_TOKENS})",
    )
    parser.add_argument(
        "--pid", type=positive, help="first process of the server here, which may be harmed"
    )
    parser.add_argument(
        "--pod",
        action="append",
        default=[],
        metavar="[NAMESPACE:]NAME|LABEL=VALUE",
        help="pod that may be deleted, such as an engine or the operator (repeat for several)",
    )
    parser.add_argument(
        "--node", help="node from which the service's engines may be evicted; needs a SERVICE"
    )
    parser.add_argument(
        "--admin", metavar="HOST:PORT", help="gRPC address of an engine that may inject faults"
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FOLDER",
        help="folder of a file system that the server writes to, which may be filled",
    )
    parser.add_argument(
        "--clock", action="store_true", help="this machine's clock may jump by an hour and back"
    )
    parser.add_argument(
        "--faults",
        type=positive,
        default=0,
        metavar="N",
        help="after each fault once, N more at random moments of streams of every kind",
    )
    add_report_files(parser, "picture")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """Parse a positive integer for argparse, whose errors show this function's name."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def seconds(text: str) -> float:
    """Parse a time in seconds for argparse, whose errors show this function's name."""
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s; use more than 0 and at most 3600")
    return number


def minutes(text: str) -> float:
    """Parse a number of minutes for argparse, whose errors show this function's name."""
    number = float(text)
    if not 0.1 <= number <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} minutes; use 0.1 to {24 * 60}")
    return number


def run(options: argparse.Namespace) -> int:
    """Run the scenarios, print every criterion, and write the reports.

    If a signal interrupts the command, the reports have the criteria that are known by then.

    Raises:
        LocalFailure: the server cannot be checked, or a report cannot be written.
    """
    check_report_files(options)
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    # As an exception, the signal ends kubectl, removes control groups and continues processes.
    interruptible.raise_at_sigterm()
    screen = Screen()
    report = VerifyReport()
    try:
        with server_url(options) as url, _monitoring(options, url) as monitoring:
            interruptible.run(_verify(url, monitoring, names, options, screen, report))
    except TargetError as error:
        raise LocalFailure(str(error)) from None
    except KeyboardInterrupt:
        screen.progress("")
        if not report.criteria:
            return INTERRUPTED

    print(f"\n{reports.summary(report)}")
    write_reports(
        report,
        [
            (options.json, reports.as_json),
            (options.markdown, reports.as_markdown),
            (options.svg, reports.as_svg),
        ],
    )
    return int(report.num_failed > 0) if report.is_complete else INTERRUPTED


async def _verify(
    url: str,
    monitoring: Monitoring,
    names: Sequence[str],
    options: argparse.Namespace,
    screen: "Screen",
    report: VerifyReport,
) -> None:
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(OpenAIClient(url, key, SILENCE_S))
        pages, engines = await _pages(monitoring, key, options, stack)
        target = await describe(client, options.model, options.context, pages, engines)
        report.url, report.model, report.context = client.url, target.model, target.context
        print(f"{client.url}: {target.model}, {target.context} tokens of context", flush=True)

        with _faults(options) as faults:
            settings = ScenarioSettings(
                minutes=options.minutes,
                large_tokens=options.large_tokens,
                ttft_s=options.ttft,
                e2e_s=options.e2e,
                gap_s=options.gap,
                num_faults=options.faults,
                faults=faults,
                missing_faults={} if options.pid else dict.fromkeys(OF_PROCESSES, NEEDS_PID),
                processes=ServerProcesses(options.pid) if options.pid else None,
                progress=screen.progress,
            )
            await verify(target, names, settings, screen.show, report)


@contextlib.contextmanager
def _monitoring(options: argparse.Namespace, url: str) -> Iterator[Monitoring]:
    """Yield where /stats and /metrics are: as asked, through kubectl, or of an `ullage up` here.

    If they are unknown, criteria that need them are skipped by name.
    """
    if options.monitoring:
        yield Monitoring(options.monitoring.removesuffix("/metrics").rstrip("/"))
    elif "://" in options.target:
        yield _local_monitoring(url)
    else:
        with contextlib.ExitStack() as stack:
            yield _forwarded_monitoring(options, stack)


def _forwarded_monitoring(options: argparse.Namespace, stack: contextlib.ExitStack) -> Monitoring:
    """Forward the ports with the metrics of a service in a cluster, and return their addresses."""
    router = f"deployment/{naming.router_name(options.target)}"
    try:
        pages = _forwarded(options.namespace, router, stack)
    except LocalFailure as failure:
        print(f"no /stats and no /metrics: {failure}", file=sys.stderr)
        return Monitoring("")
    return Monitoring(pages, tuple(_forwarded_engines(options, pages, stack)))


def _forwarded(namespace: str, target: str, stack: contextlib.ExitStack) -> str:
    """Forward the port with the metrics of a pod, and return its URL on this machine."""
    return stack.enter_context(PortForward(namespace, target, naming.METRICS_PORT)).url()


def _forwarded_engines(
    options: argparse.Namespace, pages: str, stack: contextlib.ExitStack
) -> Iterator[str]:
    """Forward the ports with the metrics of the service's engines, and yield their URLs.

    Only the soak reads them. The name of an engine in /stats is that of its pod.
    """
    if options.scenario not in ("soak", "all"):
        return
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        stats = httpx.get(f"{pages}/stats", headers=headers, timeout=PAGES_TIMEOUT_S).json()
        names = [str(engine["id"]) for engine in stats["engines"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return
    for name in names:
        with contextlib.suppress(LocalFailure):  # the pod has just ended
            yield _forwarded(options.namespace, f"pod/{name}", stack)


def _local_monitoring(url: str) -> Monitoring:
    """Return the addresses of the `ullage up` on this machine that serves a URL, if there is one.

    `ullage up` chooses the ports of the metrics, and writes their addresses into its state file.
    """
    place = urlsplit(url)
    if not _is_here(place.hostname or ""):
        return Monitoring("")
    try:
        folders = running_folders()
    except LocalFailure:
        return Monitoring("")
    for folder in folders:
        try:
            state = read_state(folder / STATE_FILE)
        except (OSError, ValueError):
            continue  # the service has just ended
        if urlsplit(state["http_url"]).port == place.port:
            engines = (engine["metrics_url"] for engine in state["engines"])
            return Monitoring(_base(state["metrics_url"]), tuple(map(_base, engines)))
    return Monitoring("")


def _is_here(host: str) -> bool:
    """Return whether a host name is an address of this machine."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _base(metrics_url: str) -> str:
    return metrics_url.removesuffix("/metrics")


async def _pages(
    monitoring: Monitoring,
    key: str,
    options: argparse.Namespace,
    stack: contextlib.AsyncExitStack,
) -> tuple[OpenAIClient | None, Sequence[OpenAIClient]]:
    """Return the client of /stats and /metrics, and the clients of the engines' /metrics.

    The first is None if the port of the API has these pages, or if no other port is known.

    Raises:
        TargetError: the address of --monitoring has no such page.
    """
    if not monitoring.url:
        return None, ()
    pages = await stack.enter_async_context(OpenAIClient(monitoring.url, key, SILENCE_S))
    if not await has_pages(pages):
        if options.monitoring:
            raise TargetError(
                f"--monitoring {options.monitoring}: neither /stats nor /metrics is there; give "
                "the port of the metrics, such as 9090 of a router"
            )
        return None, ()  # a state file of a service that has ended
    engines = [
        await stack.enter_async_context(OpenAIClient(each, key)) for each in monitoring.engines
    ]
    return pages, engines


@contextlib.contextmanager
def _faults(options: argparse.Namespace) -> Iterator[Mapping[str, Fault]]:
    """Yield the fault injections that the command-line options allow, keyed by name.

    At the end of the block, processes that a fault stopped are resumed.

    Raises:
        TargetError: the process or folder does not exist, the folder has too much free space, or
            the pod's namespace is missing.
    """
    if options.pod and not options.namespace:
        raise TargetError("--pod needs --namespace")
    if options.node and (not options.namespace or "://" in options.target):
        raise TargetError("--node needs --namespace and the name of an LLMService")
    faults: dict[str, Fault] = {}
    with contextlib.ExitStack() as stack:
        if options.pid:
            faults |= stack.enter_context(process_faults(options.pid))
        if options.admin:
            faults |= admin_faults(options.admin)
        if options.pod:
            faults |= pod_faults(options.namespace, options.pod)
        if options.node:
            engines = naming.selector_text(naming.selector(options.target, naming.ENGINE))
            faults |= node_faults(options.namespace, options.node, engines)
        if options.disk:
            faults |= disk_faults(options.disk)
        if options.clock:
            faults |= clock_faults()
        yield faults


class Screen:
    """Prints criteria to standard output, and the current step to standard error.

    A terminal shows each step. Elsewhere, a step is printed every QUIET_INTERVAL_S seconds.
    """

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._scenario = ""
        self._printed_at = time.monotonic()
        """Time of the last step that was printed outside of a terminal, or of the start."""

    def show(self, criterion: Criterion) -> None:
        """Print a criterion. Before a scenario's first criterion, print the scenario's name."""
        self.progress("")
        if criterion.scenario != self._scenario:
            self._scenario = criterion.scenario
            print(f"\n{self._scenario}", flush=True)
        print(reports.line(criterion), flush=True)

    def progress(self, step: str) -> None:
        """Show the current step, in place of the previous one on a terminal. "" shows none."""
        if self._is_live:
            print(f"\r\033[K{step and f'  … {step}'}", end="", file=sys.stderr, flush=True)
            return

        now = time.monotonic()
        if step and now >= self._printed_at + QUIET_INTERVAL_S:
            self._printed_at = now
            print(f"  … {step}", file=sys.stderr, flush=True)
