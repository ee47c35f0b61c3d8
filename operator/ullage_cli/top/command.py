"""The command `ullage top`, which polls a router and redraws its view at a fixed interval."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import httpx
import msgspec
from rich.live import Live

from ullage_cli.port_forward import PortForward
from ullage_cli.top.drawing import draw, has_blocks, make_console
from ullage_cli.top.frame import Frame, Sample, make_frame, read_metrics
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure

LOCAL_URL = "http://127.0.0.1:8000"
"""URL of the router that `ullage up` starts on its default port."""
TIMEOUT_S = 5.0
"""Timeout of one HTTP request to the router, in seconds."""

HELP = """examples:
  ullage top                                       watch ullage up on this machine
  ullage top --url http://127.0.0.1:8080           watch ullage up --http-port 8080
  ullage top --namespace prod --service chat       watch a cluster, by kubectl port-forward
  ullage top --once                                print one frame, with rates over --interval
  ullage top --once -o json | jq '.engines[].headroom_bytes'

It reads /stats and /metrics, which routers serve at the metrics port (9090), and ullage up
also at the API's port. With tenants.protectStats, set ULLAGE_API_KEY to a tenant's key.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage top`."""
    parser = commands.add_parser(
        "top",
        help="watch engines, queue and decisions live",
        description="Show a service's engines, queue and decisions live in the terminal.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help=f"URL of the router ({LOCAL_URL})")
    parser.add_argument("--service", metavar="NAME", help="LLMService in the cluster of kubectl")
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the LLMService (default)"
    )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between frames (1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="json: one frame a line"
    )
    parser.add_argument("--api-key", help="API key of a tenant (default: $ULLAGE_API_KEY)")
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    """Parse the interval between two frames in seconds."""
    number = float(text)
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s is not an interval; use 0.1 to 3600")
    return number


def run(options: argparse.Namespace) -> int:
    """Show frames until Ctrl-C, or one frame with --once.

    Raises:
        LocalFailure: the router cannot be reached.
    """
    if options.url and options.service:
        raise LocalFailure("--url and --service: give only one of them")
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")

    if threading.current_thread() is threading.main_thread():
        # SIGTERM unwinds the stack below, which ends kubectl. Otherwise kubectl would outlive this
        # process.
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        with contextlib.ExitStack() as stack:
            url = _router_url(options, stack)
            router = stack.enter_context(RouterPages(url, key))
            _watch(router, options)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # people end the command with Ctrl-C, and scripts with head -n 1
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _router_url(options: argparse.Namespace, stack: contextlib.ExitStack) -> Callable[[], str]:
    """Return a function that returns the router's current URL.

    The URL may change, because a restarted `kubectl port-forward` may pick another port.
    """
    if not options.service:
        address = (options.url or LOCAL_URL).rstrip("/")
        return lambda: address

    target = f"deployment/{naming.router_name(options.service)}"
    forward = PortForward(options.namespace, target, naming.METRICS_PORT)
    return stack.enter_context(forward).url


def _watch(router: "RouterPages", options: argparse.Namespace) -> None:
    """Show frames until interrupted, redrawing in place if the output is a terminal.

    Raises:
        LocalFailure: the first request to the router fails. Later failures are only shown.
    """
    console = make_console()
    frames = _frames(router, options.interval)

    if options.output == "json" or options.once or not console.is_terminal:
        for frame, problem in frames:
            if frame and options.output == "json":
                print(msgspec.json.encode(frame).decode(), flush=True)
            elif frame:
                console.print(draw(frame, "", has_blocks(console)))
            elif problem:
                print(f"error: {problem}", file=sys.stderr, flush=True)
            if options.once:
                return

    shown: Frame | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for frame, problem in frames:
            shown = frame or shown
            if shown:
                live.update(draw(shown, problem, has_blocks(console)), refresh=True)


def _frames(router: "RouterPages", interval_s: float) -> Iterator[tuple[Frame | None, str]]:
    """Yield `(frame, "")` after each interval, or `(None, reason)` if sampling the router failed.

    The first sample is taken before the first interval. An error in that sample is raised.
    """
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


class RouterPages:
    """HTTP client for a router's `/stats` and `/metrics`.

    The connection stays open, so that the same router process answers all requests.

    Args:
        url: returns the router's URL. It is called before every sample.
        key: a tenant's API key (empty if none is needed).
    """

    def __init__(self, url: Callable[[], str], key: str) -> None:
        self._url = url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers)

    def __enter__(self) -> "RouterPages":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def sample(self) -> Sample:
        """Fetch `/stats` and `/metrics` as one sample.

        Raises:
            LocalFailure: the router does not respond, or is not an Ullage router.
        """
        url = self._url()
        stats = self._page(f"{url}/stats")
        metrics = self._page(f"{url}/metrics")
        try:
            document = stats.json()
            return Sample(time.monotonic(), document, read_metrics(metrics.text))
        except ValueError as error:
            raise LocalFailure(f"{url}/stats: not a page of an Ullage router ({error})") from None

    def _page(self, url: str) -> httpx.Response:
        """Fetch one page from the router.

        Raises:
            LocalFailure: the router does not respond with status 200.
        """
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
                f"{url}: status {page.status_code}; in a cluster the metrics port (9090) "
                "serves this page, and with router.publicStats also the API's port"
            )
        return page
