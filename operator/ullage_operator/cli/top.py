"""`ullage top`: a service's engines, queue and decisions, live in the terminal."""

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import FrameType

import httpx
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.cli.top_frame import (
    EngineRow,
    Frame,
    LatestRow,
    Sample,
    make_frame,
    read_metrics,
    total_headroom,
)

LOCAL_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
FORWARD_TIMEOUT_S = 20.0
BAR_CELLS = 20
PLAIN_WIDTH = 140
"""Characters of a line where there is no terminal to ask for its width."""

HELP = """examples:
  ullage top                                       of ullage up on this machine
  ullage top --url http://127.0.0.1:8080           of ullage up --http-port 8080
  ullage top --namespace prod --service chat       of a cluster, through kubectl port-forward
  ullage top --once                                one frame as plain text; rates over --interval
  ullage top --once -o json | jq '.engines[].headroom_bytes'

It reads /stats and /metrics, which routers serve at the port of the metrics (9090), and ullage up
at the port of the API, too. ULLAGE_API_KEY may have the key that tenants.protectStats asks for.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "top",
        help="watch engines, queue and decisions live",
        description="Shows a service's engines, queue and decisions, live in the terminal.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help=f"of the router ({LOCAL_URL})")
    parser.add_argument("--service", metavar="NAME", help="LLMService in the cluster of kubectl")
    parser.add_argument("-n", "--namespace", default="default", help="of the LLMService (default)")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="between frames (1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="json: a frame a line"
    )
    parser.add_argument("--api-key", help="default: $ULLAGE_API_KEY")
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    """Seconds between frames."""
    number = float(text)
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s is no interval; use 0.1 to 3600")
    return number


def run(options: argparse.Namespace) -> int:
    if options.url and options.service:
        raise LocalFailure("--url and --service: give the one or the other")
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # kubectl would outlive this process
    try:
        with contextlib.ExitStack() as stack:
            if options.service:
                forward = stack.enter_context(
                    PortForward(
                        options.namespace,
                        f"deployment/{naming.router_name(options.service)}",
                        naming.METRICS_PORT,
                    )
                )
                url: Callable[[], str] = forward.url
            else:
                address = (options.url or LOCAL_URL).rstrip("/")
                url = lambda: address  # noqa: E731 - a constant in the shape of PortForward.url
            watch(stack.enter_context(Router(url, key)), options)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # Ctrl-C is how people end it, and head -n 1 how scripts do
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def watch(router: "Router", options: argparse.Namespace) -> None:
    """Show frames until it is interrupted; the first sample must come, later ones may fail.

    Raises:
        LocalFailure: the router does not answer the first time.
    """
    console = make_console()
    frames = frames_of(router, options.interval)
    if options.output == "json" or options.once or not console.is_terminal:
        for frame, problem in frames:
            if frame and options.output == "json":
                print(msgspec.json.encode(frame).decode(), flush=True)
            elif frame:
                console.print(render(frame, "", has_blocks(console)))
            elif problem:
                print(f"error: {problem}", file=sys.stderr, flush=True)
            if options.once:
                return
    shown: Frame | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for frame, problem in frames:
            shown = frame or shown
            if shown:
                live.update(render(shown, problem, has_blocks(console)), refresh=True)


def frames_of(router: "Router", interval_s: float) -> Iterator[tuple[Frame | None, str]]:
    """Yield a frame every interval, or what was wrong when none could be had."""
    before = router.sample()
    while True:
        time.sleep(interval_s)
        try:
            now = router.sample()
        except LocalFailure as failure:
            yield None, str(failure)
            continue
        yield make_frame(before, now), ""
        before = now


class Router:
    """The router that is asked; its connection stays open, and with it the process that answers.

    Args:
        url: says where it is, before every sample.
    """

    def __init__(self, url: Callable[[], str], key: str) -> None:
        self._url = url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers)

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def sample(self) -> Sample:
        """Read both pages.

        Raises:
            LocalFailure: the router does not answer, or not with these pages.
        """
        url = self._url()
        stats, metrics = (self._page(f"{url}{path}") for path in ("/stats", "/metrics"))
        try:
            document = stats.json()
            return Sample(time.monotonic(), document, read_metrics(metrics.text))
        except ValueError as error:
            raise LocalFailure(f"{url}/stats: not what a router of Ullage says ({error})") from None

    def _page(self, url: str) -> httpx.Response:
        try:
            page = self._http.get(url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LocalFailure(
                f"{url}: {error or type(error).__name__}; start a service (ullage up -f "
                "examples/smollm2.yaml), or name another router with --url or --service"
            ) from None
        if page.status_code == httpx.codes.UNAUTHORIZED:
            raise LocalFailure(f"{url}: needs a tenant's key; give --api-key or ULLAGE_API_KEY")
        if page.status_code != httpx.codes.OK:
            raise LocalFailure(
                f"{url}: status {page.status_code}; in a cluster the port of the metrics (9090) "
                "serves this, or the API's with router.publicStats"
            )
        return page


class PortForward:
    """`kubectl port-forward` to a port of a pod, or of one of a workload.

    It is begun anew when it has ended, as it does when the pod is replaced.
    """

    def __init__(self, namespace: str, target: str, port: int) -> None:
        self._command = ["kubectl", "--namespace", namespace, "port-forward", target, f":{port}"]
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    def __enter__(self) -> "PortForward":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def url(self) -> str:
        """Return where the port is on this machine.

        Raises:
            LocalFailure: kubectl is not here, or cannot forward it.
        """
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._address = self._start()
        return self._address

    def _start(self) -> str:
        if shutil.which("kubectl") is None:
            raise LocalFailure(
                "kubectl is not here; install it, or forward the port yourself and name its address"
            )
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            self._command, stdout=pipe, stderr=pipe, text=True
        )
        assert process.stdout and process.stderr
        is_told, _, _ = select.select([process.stdout], [], [], FORWARD_TIMEOUT_S)
        line = process.stdout.readline() if is_told else ""
        # Forwarding from 127.0.0.1:43211 -> 9090
        host, _, port = line.removeprefix("Forwarding from ").partition(" ")[0].rpartition(":")
        if not port.isdecimal():
            process.terminate()
            said = " ".join(process.stderr.read().split()) or "it said nothing"
            raise LocalFailure(f"{' '.join(self._command)}: {said}")
        return f"http://{host}:{port}"

    def _stop(self) -> None:
        if process := self._process:
            self._process = None
            process.terminate()
            with process:
                pass  # waits for it, and closes its pipes


# Drawing -----------------------------------------------------------------------------------------

ACTION_STYLES = {
    "accept": "green",
    "shrink": "yellow",
    "queue": "magenta",
    "route4": "cyan",
    "reject": "bold red",
}
PARTS = (("used", "blue"), ("committed", "bright_blue"), ("reclaimable", "green"))
BLOCKS, LETTERS = "█▓▒░", "#=+."
"""Cells of a bar: the parts, and what is free."""


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def has_blocks(console: Console) -> bool:
    return console.encoding.startswith("utf")


def render(frame: Frame, problem: str, with_blocks: bool) -> Group:
    """Draws a frame.

    Args:
        problem: why it is not new; empty where it is.
        with_blocks: the terminal can show block characters.
    """
    lines: list[Text | Table] = [headline(frame)]
    if problem:
        lines.append(Text(f"no answer, still asking: {problem}", style="bold red"))
    lines += [Text(), engines_table(frame, with_blocks), legend(with_blocks)]
    lines += [Text(), queue_line(frame)]
    lines += [Text(), decisions_table(frame), Text(), latest_table(frame.latest)]
    return Group(*lines)


def headline(frame: Frame) -> Text:
    headroom, pool = total_headroom(frame.engines)
    text = Text.assemble((frame.model, "bold"), "  ")
    text.append("ready" if frame.ready else "not ready", "green" if frame.ready else "bold red")
    text.append(
        f"   {frame.requests_per_s:.1f} requests/s   {frame.tokens_per_s:.1f} tokens/s   "
        f"{frame.inflight} in flight   headroom {size(headroom)} of {size(pool)}"
    )
    return text


def make_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def legend(with_blocks: bool) -> Text:
    text = Text("KV: ", "dim")
    cells = BLOCKS if with_blocks else LETTERS
    for cell, (name, style) in zip(cells, (*PARTS, ("free", "dim")), strict=True):
        text.append(cell, style).append(f" {name}  ", "dim")
    return text


def engines_table(frame: Frame, with_blocks: bool) -> Table:
    cells = BLOCKS if with_blocks else LETTERS
    table = make_table()
    for name in ("engine", "pool", "state", "pressure", "KV"):
        table.add_column(name, no_wrap=True)
    for name in ("headroom", "of", "used", "run", "wait", "tokens/s", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in frame.engines:
        table.add_row(
            engine.id,
            engine.pool if engine.route == engine.pool else f"{engine.pool} {engine.route}",
            Text(engine.state, "green" if engine.state == "ready" else "bold red"),
            Text(str(engine.pressure_level), "yellow" if engine.pressure_level else ""),
            bar(engine, cells) if engine.pool_bytes else Text(engine.trouble, "red"),
            size(engine.headroom_bytes),
            size(engine.pool_bytes),
            size(engine.used_bytes),
            str(engine.running),
            str(engine.waiting),
            f"{engine.tokens_per_s:.1f}",
            str(engine.restarts),
        )
    if not frame.engines:
        table.add_row("no engine has reported yet")
    return table


def bar(engine: EngineRow, cells: str) -> Text:
    """Draws the KV pool: each part that is not empty has a cell at the least."""
    sizes = (engine.used_bytes, engine.committed_bytes, engine.reclaimable_bytes)
    text = Text()
    num_free = BAR_CELLS
    for cell, (_, style), part in zip(cells, PARTS, sizes, strict=False):
        count = min(num_free, max(part > 0, round(BAR_CELLS * part / engine.pool_bytes)))
        text.append(cell * count, style)
        num_free -= count
    return text.append(cells[-1] * num_free, "dim")


def queue_line(frame: Frame) -> Text:
    text = Text.assemble(
        ("queue ", "bold"), f"{frame.queue_requests} of {frame.queue_max_requests}"
    )
    if frame.queue_requests:
        text.append(f"   {size(frame.queue_bytes)}   oldest {frame.queue_oldest_s:.1f} s")
    text.append("   ")
    style = ACTION_STYLES["reject"] if frame.refused_per_s else ""
    text.append(f"refused {frame.refused_per_s:.1f}/s", style)
    if waits := frame.retry_after_s:
        text.append(f"   Retry-After {waits[0]} to {waits[1]} s, of the latest")
    return text


def decisions_table(frame: Frame) -> Table:
    table = make_table()
    table.add_column("decision")
    table.add_column("reason")
    table.add_column("per second", justify="right")
    table.add_column("total", justify="right")
    for row in frame.decisions[:8]:
        action = Text(row.action, ACTION_STYLES.get(row.action, ""))
        table.add_row(action, row.reason, f"{row.per_s:.1f}", str(row.total))
    if not frame.decisions:
        table.add_row("none yet")
    return table


def latest_table(rows: tuple[LatestRow, ...]) -> Table:
    table = make_table()
    for name in ("latest", "decision", "reason", "status", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("needs", "available", "queued", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("request", no_wrap=True, overflow="ellipsis")
    for row in rows[:12]:
        retry = f" retry {row.retry_after_s} s" if row.retry_after_s is not None else ""
        table.add_row(
            datetime.fromtimestamp(row.arrived).strftime("%H:%M:%S"),
            Text(row.action or "-", ACTION_STYLES.get(row.action, "")),
            row.reason,
            f"{row.status}{retry}",
            row.engine or row.route,
            size(row.predicted_bytes),
            size(row.available_bytes and max(0, row.available_bytes)),
            f"{row.queued_s:.2f} s" if row.queued_s else "",
            f"{row.ttft_s:.2f} s" if row.ttft_s is not None else "",
            row.request_id,
        )
    return table


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return ""
    number = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number = number / 1024
        units = units[1:]
    return (
        f"{number:.0f} {units[0]}"
        if number >= 100 or units[0] == "B"
        else f"{number:.1f} {units[0]}"
    )
