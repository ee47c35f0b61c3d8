"""`ullage up` serves the LLMService of a manifest on this machine until Ctrl-C.

The startup progress is shown as a live table on a terminal, and as plain lines elsewhere.
"""

import argparse
import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ullage_cli.local.files import make_folders, write_files
from ullage_cli.local.plan import LocalPlan, plan_local
from ullage_cli.local.ports import LOOPBACK
from ullage_cli.manifest_file import BASE_HELP, read_service
from ullage_cli.processes.runtime import LocalRuntime, is_among, keep_scaled
from ullage_cli.processes.state import RUN_DIR_PREFIX, STATE_FILE, service_state, write_state
from ullage_common.entry_points import missing_extra
from ullage_common.process.tracing import TracingSection
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.spec import Service

READ_BYTES = 4096

HELP = """examples:
  ullage up -f examples/smollm2.yaml
  ullage up -f service.yaml --http-port 8080 --grpc-port 0    (0 chooses any free port)
  ullage up -f service.yaml --secrets ./secrets               (./secrets/NAME/KEY for each Secret)
  ullage up -f service.yaml --run-dir ./run                    (keeps configuration and logs)
  ullage up -f service.yaml --otlp-endpoint http://127.0.0.1:4318   (spans, for example to Jaeger)
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage up`."""
    parser = commands.add_parser(
        "up",
        help="serve a manifest on this machine until Ctrl-C",
        description="Serve an LLMService on this machine: the operator's plan, run as processes.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of an LLMService")
    parser.add_argument("--base", type=Path, action="append", default=[], help=BASE_HELP)
    parser.add_argument("--http-port", type=port, default=8000, help="port of the HTTP API (8000)")
    parser.add_argument(
        "--secrets", type=Path, help="folder with one folder per Secret, with one file per key"
    )
    add_process_options(parser)
    parser.set_defaults(run=run)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the processes on this machine, which no manifest has."""
    parser.add_argument("--grpc-port", type=port, default=9000, help="port of the gRPC API (9000)")
    parser.add_argument("--run-dir", type=Path, help="keep configuration and logs in this folder")
    parser.add_argument("--state-file", type=Path, help="also write state.json to this path")
    parser.add_argument(
        "--otlp-endpoint",
        type=collector,
        metavar="URL",
        help="send spans to this collector instead of the manifest's (over HTTP for port 4318 or "
        "a URL with a path, otherwise over gRPC)",
    )
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="stop when standard input ends, so that a program that starts this one never leaves "
        "it behind",
    )
    parser.add_argument("--verbose", action="store_true", help="log at debug level")


def port(text: str) -> int:
    """Parse a TCP port (0 for any free port)."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to 65535")
    return number


def collector(text: str) -> TracingSection:
    """Return tracing settings for the OTLP collector at a URL.

    The transport is HTTP if the port is 4318 or the URL has a path, and gRPC otherwise.
    """
    try:
        url = urlsplit(text)
        is_http = url.port == 4318 or url.path.strip("/")
        return TracingSection(endpoint=text, protocol="http" if is_http else "grpc")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def traced_to(service: Service, section: TracingSection) -> Service:
    """Return a copy of the service with the given tracing settings."""
    replaced = msgspec.structs.replace
    observability = replaced(service.spec.observability, tracing=section)
    return replaced(service, spec=replaced(service.spec, observability=observability))


def run(options: argparse.Namespace) -> int:
    """Serve the manifest until the service is stopped.

    Raises:
        LocalFailure: the manifest is invalid, this machine cannot serve it, or a pod failed for
            good.
    """
    check_extras()
    service = read_service(options.file, options.base)
    serve_service(service, options, secrets=options.secrets)
    return 0


def check_extras() -> None:
    """Raise an error if the router or the engine lacks packages in this environment."""
    for extra in ("router", "engine"):
        if error := missing_extra(extra):
            raise LocalFailure(error)


def serve_service(
    service: Service,
    options: argparse.Namespace,
    *,
    host: str = LOOPBACK,
    secrets: Path | None = None,
) -> None:
    """Serve a service until it is stopped.

    Args:
        service: the service.
        options: options of `ullage up` about ports, folders and logs.
        host: address on which the router serves its APIs.
        secrets: folder with one folder per Secret, or None.

    Raises:
        LocalFailure: this machine cannot serve it, or a pod failed for good.
    """
    if options.otlp_endpoint:
        service = traced_to(service, options.otlp_endpoint)
    if options.state_file and not options.state_file.parent.is_dir():
        raise LocalFailure(f"--state-file {options.state_file}: its folder does not exist; make it")

    with run_directory(options.run_dir) as run_dir, contextlib.ExitStack() as kept:
        plan = plan_local(
            service,
            run_dir,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            log_level="debug" if options.verbose else "info",
            secrets=secrets,
            # Engines run in this interpreter's environment.
            has_vllm=importlib.util.find_spec("vllm") is not None,
            kept=kept,
            host=host,
        )
        write_files(plan.files)
        make_folders(plan.folders)
        asyncio.run(_serve(plan, run_dir, options.state_file, until_eof=options.until_eof))


@contextlib.contextmanager
def run_directory(chosen: Path | None) -> Iterator[Path]:
    """Yield the chosen folder, or a temporary one that is removed on exit.

    Raises:
        LocalFailure: the chosen folder cannot be made.
    """
    if chosen is not None:
        try:
            chosen.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalFailure(f"--run-dir {chosen}: {error.strerror}; choose another") from error
        with _locked(chosen):
            yield chosen.resolve()
        return

    folder = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep systemd-tmpfiles from removing old files of a folder below /tmp.

    A restarted pod reads its configuration again, after however many days. tmpfiles.d leaves out
    folders that are locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


async def _serve(
    plan: LocalPlan, run_dir: Path, state_file: Path | None, *, until_eof: bool = False
) -> None:
    """Run the plan until SIGINT or SIGTERM. A second signal kills the remaining processes.

    Args:
        plan: the processes to run.
        run_dir: folder of logs and of state.json (the service's addresses and process ids).
        state_file: another file to which state.json is written.
        until_eof: whether the end of standard input stops the service, too.

    Raises:
        LocalFailure: a pod failed for good. All processes have exited before the error is raised.
    """
    console = open_console(sys.stdout)
    stop = asyncio.Event()
    names = [pod.name for pod in plan.pods if is_among(plan.pods, pod, plan.sizes)]
    view = StartView(names, console)
    runtime = LocalRuntime(plan.pods, run_dir, view.update, plan.sizes)

    def on_signal() -> None:
        if stop.is_set():
            runtime.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    if until_eof:
        _call_at_eof(stop.set)

    console.print(f"starting {plan.model}: {', '.join(names)}")
    for line in plan.engines:
        console.print(line, soft_wrap=True, markup=False)

    async with runtime.running() as failed:
        try:
            with view:
                ready = asyncio.create_task(runtime.ready())
                await _first_of(failed, ready, stop)

            if ready.done() and not stop.is_set():
                _announce(plan, runtime, run_dir, state_file, console, view.seconds)
                async with _scaling(plan, runtime, console):
                    await _first_of(failed, None, stop)
        finally:
            ready.cancel()
            was_asked = stop.is_set()
            stop.set()  # from here on a signal kills
            hint = " (Ctrl-C again: at once)" if was_asked else " (Ctrl-C: at once)"
            console.print(f"stopping ...{hint}")


def _call_at_eof(on_end: Callable[[], None]) -> None:
    """Call a function on the running event loop when standard input ends.

    A thread reads, because an event loop cannot watch regular files and /dev/null.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        wait_for_eof(0)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the service has ended
            loop.call_soon_threadsafe(on_end)

    threading.Thread(target=read, name="stdin", daemon=True).start()


def wait_for_eof(descriptor: int) -> None:
    """Read a file to its end, or until it cannot be read, for example without its terminal."""
    with contextlib.suppress(OSError):
        while True:
            try:
                if not os.read(descriptor, READ_BYTES):
                    return
            except BlockingIOError:
                # A program that shares the file has made it non-blocking.
                select.select([descriptor], [], [])


@contextlib.asynccontextmanager
async def _scaling(plan: LocalPlan, runtime: LocalRuntime, console: Console) -> AsyncIterator[None]:
    """Scale the pools according to the router's load reports while the block runs."""
    if not plan.policies:
        yield
        return

    router = next(p.pod for p in runtime.processes if "http" in p.pod.ports)
    keeping = asyncio.create_task(
        keep_scaled(
            runtime,
            plan.policies,
            plan.sizes,
            router.ports["metrics"],
            lambda pool, text: console.print(f"pool {pool}: {text}", markup=False),
        )
    )

    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _first_of(
    failed: "asyncio.Future[None]", ready: "asyncio.Task[None] | None", stop: asyncio.Event
) -> None:
    """Wait until a pod fails, all pods are ready, or `stop` is set.

    Args:
        failed: future that raises `PodFailed` if a pod fails permanently.
        ready: task that finishes when all pods are ready, or None if readiness does not matter.
        stop: event that a signal sets.

    Raises:
        PodFailed: a pod has failed permanently.
    """
    stopped = asyncio.create_task(stop.wait())
    waited: set[asyncio.Future[Any]] = {failed, stopped}
    if ready:
        waited.add(ready)

    done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for future in done - {stopped}:
        future.result()


class _LossyOutput:
    """A text stream that drops text while it cannot be written.

    A service outlives its terminal, the reader of its pipe, and free space for its output.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def open_console(stream: IO[str] | None) -> Console:
    """Return a console on a stream that may become unwritable at any time, or that is missing."""
    file = cast(IO[str], _LossyOutput(stream)) if stream is not None else None
    return Console(file=file, highlight=False)


class StartView:
    """Shows the startup progress of every pod until all pods are ready.

    Args:
        names: names of the pods that are starting.
        console: the console to print on.
    """

    def __init__(self, names: list[str], console: Console) -> None:
        self._progress = dict.fromkeys(names, "starting")
        self._console = console
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "StartView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def update(self, name: str, progress: str) -> None:
        """Show a pod's progress if it has changed."""
        if self._progress.get(name) == progress:
            return

        self._progress[name] = progress
        if self._live.is_started:
            self._live.update(self._table())
        else:
            line = f"{self.seconds:5.1f} s  {name}: {progress}"
            self._console.print(line, highlight=False, markup=False)

    def _table(self) -> Table:
        """Return a table with one row per pod."""
        table = Table.grid(padding=(0, 2))
        for name, progress in self._progress.items():
            table.add_row(name, Text(progress), f"{self.seconds:.1f} s")
        return table


def _announce(
    plan: LocalPlan,
    runtime: LocalRuntime,
    run_dir: Path,
    state_file: Path | None,
    console: Console,
    seconds: float,
) -> None:
    """Write the state files, and print the addresses of the ready service."""
    state = service_state(plan.model, runtime.processes, run_dir)
    for path in (run_dir / STATE_FILE, state_file):
        if path:
            write_state(path, state)

    url = state["http_url"]
    model = state["model"]
    console.print(f"ready in {seconds:.1f} s: {model}")
    console.print(f"  HTTP     {url}/v1", soft_wrap=True)
    console.print(f"  gRPC     {state['grpc_target']}")
    console.print(f"  console  {url}/console", soft_wrap=True)
    console.print(f"  stats    {url}/stats")
    console.print(f"  metrics  {state['metrics_url']}")
    console.print(f"  logs     {run_dir}", soft_wrap=True)

    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    command = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"try: {command}", soft_wrap=True, markup=False)
    console.print("trace a request: ullage trace ID (the answer's header x-request-id)")
    console.print("Ctrl-C stops it.")
