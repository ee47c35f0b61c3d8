"""Runs the pods of a plan as processes until it is stopped, and ends every one of them then.

A process is restarted when it crashes, asked by the probes that the kubelet would make whether it
serves, and started or stopped as its pool scales, by the same measures and decisions as in a
cluster.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import grpc
import httpx
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage_cli.local.plan import LOOPBACK, File, Pod
from ullage_common.wire.channels import open_channel
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.controller.autoscaler import Autoscaler, ScaledService

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0
"""A process that has been ready for this long starts over with the first backoff."""
MAX_FAILURES = 5
"""Exits in a row, none after a steady run, until it is taken for hopeless."""
TAIL_LINES = 5
READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes of a line of output; a longer one is logged as several."""
MISUSE = 2
"""Exit status of a process whose configuration can never work."""
PR_SET_PDEATHSIG = 1


class PodFailed(LocalFailure):
    """A pod that can never work; the message is its own last words."""


def die_with_parent() -> None:
    """Run in the child: the kernel kills it when the parent is gone, however that went.

    SIGKILL, because then nobody is left to insist. An engine's worker asks for the same.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class PodProcess:
    """Owner of one pod's process and log file."""

    def __init__(self, pod: Pod, log_path: Path, on_progress: Callable[[str], None]) -> None:
        self.pod = pod
        self.log_path = log_path
        self.restarts = 0
        self.ready_since: float | None = None
        """Time at which the present process was ready first; None: it has not been."""
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._last_error = ""
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def run(self) -> None:
        """Keep the process running until `stop`.

        Raises:
            PodFailed: it exited with the status that says a restart cannot help, or too often.
        """
        failures = 0
        while not self._stopping.is_set():
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if status == MISUSE:
                raise PodFailed(self._last_error or f"exit status 2\n{tail(self.log_path)}")
            failures = 1 if self._was_steady() else failures + 1
            if failures == MAX_FAILURES:
                count = f"exited {failures} times in a row, last with status {status}"
                words = f": {self._last_error}" if self._last_error else f"\n{tail(self.log_path)}"
                raise PodFailed(count + words)
            pause = min(FIRST_BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S)
            reason = f" ({self._last_error})" if self._last_error else ""
            self._on_progress(f"exited with status {status}{reason}; restarting in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return
            self.restarts += 1

    async def stop(self) -> None:
        """End the process with SIGTERM, and its group with SIGKILL after the pod's grace."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.pod.grace_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL to the pod with its children, which are a session of their own, for good."""
        self._stopping.set()
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> int:
        self._last_error = ""
        self.ready_since = None
        self._process = await asyncio.create_subprocess_exec(
            *self.pod.command,
            env={**os.environ, **self.pod.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in a terminal goes to the whole foreground group; pods are stopped in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if self._stopping.is_set():
            self._process.terminate()  # stopped while it was being started
        assert self._process.stdout is not None
        probing = asyncio.create_task(self._probe())
        try:
            with self.log_path.open("a", encoding="utf-8") as log:
                await self._follow(self._process.stdout, log)
            return await self._process.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self) -> None:
        await wait_ready(self.pod)
        self.ready_since = time.monotonic()

    def _was_steady(self) -> bool:
        """Return whether the process that ended had been ready for long; a long start is no sign
        that the next one succeeds."""
        ready_since = self.ready_since
        return ready_since is not None and time.monotonic() - ready_since > STEADY_S

    async def _follow(self, output: asyncio.StreamReader, log: TextIO) -> None:
        async for line in lines_of(output):
            print(line, file=log, flush=True)
            if "error: " in line and not line.startswith("{"):
                self._last_error = line.partition("error: ")[2]
            elif progress := progress_of(line):
                self._on_progress(progress)


async def lines_of(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines as they are written; of an overlong one, pieces, so that none has to be held whole."""
    pending = b""
    while chunk := await output.read(READ_BYTES):
        *whole, pending = (pending + chunk).split(b"\n")
        for raw in whole:
            yield raw.decode(errors="replace").rstrip()
        if len(pending) > LONGEST_LINE:
            yield pending.decode(errors="replace")
            pending = b""
    if pending:
        yield pending.decode(errors="replace").rstrip()


def tail(path: Path) -> str:
    """The last lines of a log."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


class LogLine(msgspec.Struct):
    """The fields of a JSON log line that show progress."""

    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


def progress_of(line: str) -> str:
    """What to show of a log line: its stage and percentage, or nothing."""
    if not line.startswith("{"):
        return ""
    with contextlib.suppress(msgspec.MsgspecError):
        log = msgspec.json.decode(line, type=LogLine)
        percent = f" {log.done_bytes / log.total_bytes:.0%}" if log.total_bytes > 0 else ""
        return f"{log.stage}{percent}" if log.stage else ""
    return ""


POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0


async def wait_ready(pod: Pod) -> None:
    """Return once the pod answers its readiness probe; it may take for ever.

    As in Kubernetes a pod without a probe, which has no ports, is ready as it starts.
    """
    if not pod.ports:
        return
    if "probe" in pod.ports:
        await wait_grpc(f"{LOOPBACK}:{pod.ports['probe']}")
    elif "http" in pod.ports:
        await wait_http(f"http://{LOOPBACK}:{pod.ports['http']}/readyz")
    else:
        await wait_grpc(f"{LOOPBACK}:{pod.ports['grpc']}")


async def wait_http(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).is_success:
                    return
            await asyncio.sleep(POLL_S)


async def wait_grpc(target: str) -> None:
    request = health_pb2.HealthCheckRequest(service="readiness")
    async with open_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(request, timeout=PROBE_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(POLL_S)


END_TIMEOUT_S = 20.0

OnProgress = Callable[[str, str], None]
"""Called with a pod's name and what it is doing."""


class LocalRuntime:
    """Owner of all processes of one service.

    Args:
        pods: all that may run.
        run_dir: where their logs go.
        on_progress: called with the name and state of each pod.
        sizes: by pool, how many of its pods run at first; of a pool that is not named, all.
    """

    def __init__(
        self,
        pods: Sequence[Pod],
        run_dir: Path,
        on_progress: OnProgress,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._pods = pods
        self._run_dir = run_dir
        self._on_progress = on_progress
        self._running = {
            pod.name: self._process(pod) for pod in pods if is_among(pods, pod, sizes or {})
        }
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None

    @property
    def processes(self) -> list[PodProcess]:
        """Processes of the pods that run."""
        return list(self._running.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[None]]:
        """Start every pod; inside, the yielded future ends only by `PodFailed`.

        On leaving, routers stop before engines so that streams end as answers and not as errors.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for process in self.processes:
            self._start(process)
        try:
            yield self._failed
        finally:
            routers = [p for p in self.processes if "http" in p.pod.ports]
            engines = [p for p in self.processes if "http" not in p.pod.ports]
            for group in (routers, engines):
                await asyncio.gather(*(process.stop() for process in group))
            await self._end_runs()
            if self._failed.done():
                self._failed.exception()  # which nobody may have waited for

    async def scale(self, pool: str, size: int) -> None:
        """Start pods of a pool, or stop the last ones and wait for their end."""
        sizes = {pool: size}
        for pod in self._pods:
            if pod.part != f"pools.{pool}":
                continue
            should_run = is_among(self._pods, pod, sizes)
            process = self._running.get(pod.name)
            if should_run and process is None:
                self._running[pod.name] = self._process(pod)
                self._start(self._running[pod.name])
            elif process and not should_run:
                await process.stop()
                await asyncio.gather(self._runs.pop(pod.name), return_exceptions=True)
                del self._running[pod.name]
                self._on_progress(pod.name, "asleep" if size == 0 else "stopped")

    def kill(self) -> None:
        """End all processes at once, without a grace."""
        for process in self.processes:
            process.kill()

    async def ready(self) -> None:
        """Return once every pod answers its readiness probe."""
        await asyncio.gather(*(self._ready(process.pod) for process in self.processes))

    async def _ready(self, pod: Pod) -> None:
        await wait_ready(pod)
        self._on_progress(pod.name, "ready")

    def _start(self, process: PodProcess) -> None:
        self._runs[process.pod.name] = asyncio.create_task(self._run(process))

    async def _end_runs(self) -> None:
        """Wait for the end of all processes, which were asked to stop."""
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=END_TIMEOUT_S)
        for run in self._runs.values():
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)

    async def _run(self, process: PodProcess) -> None:
        try:
            await process.run()
        except PodFailed as error:
            assert self._failed is not None, "pods run inside `running`"
            if not self._failed.done():
                self._failed.set_exception(PodFailed(f"{process.pod.part}: {error}"))

    def _process(self, pod: Pod) -> PodProcess:
        name = pod.name
        return PodProcess(
            pod, self._run_dir / f"{name}.log", lambda text: self._on_progress(name, text)
        )


def is_among(pods: Sequence[Pod], pod: Pod, sizes: Mapping[str, int]) -> bool:
    """Whether a pod is one of the first of its pool, as many as its size; others always are."""
    size = sizes.get(pod.part.removeprefix("pools."))
    mates = [each.name for each in pods if each.part == pod.part]
    return size is None or mates.index(pod.name) < size


def write_files(files: Sequence[File]) -> None:
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text, encoding="utf-8")


def make_folders(folders: Sequence[Path]) -> None:
    """Make the folders of file tiers.

    Raises:
        LocalFailure: one cannot be made, or not be written to.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise LocalFailure(
                f"memory.tiers.file.path {folder}: {error.strerror}; choose a folder in which you "
                "may write, or leave path out for one in the run directory"
            ) from error


OnChange = Callable[[str, str], None]
"""Called with a pool and what becomes of it."""


async def keep_scaled(
    runtime: LocalRuntime,
    policies: Mapping[str, AutoscalingSpec],
    sizes: Mapping[str, int],
    metrics_port: int,
    on_change: OnChange,
) -> None:
    """Starts and stops engines as their router's measures ask for, until it is cancelled.

    Args:
        sizes: of the pools at first.
        metrics_port: the router's.
    """
    news = asyncio.Event()
    scaler: Autoscaler[str] = Autoscaler(lambda _: news.set())
    followed = ScaledService(policies, (f"http://{LOOPBACK}:{metrics_port}",))
    present = dict(sizes)
    try:
        while True:
            news.clear()
            for pool, decision in scaler.follow("", followed, sizes).pools.items():
                if decision.replicas != present[pool]:
                    count = decision.replicas
                    on_change(pool, f"{count} engines ({decision.reason}: {decision.message})")
                    present[pool] = count
                    await runtime.scale(pool, count)
            await news.wait()
    finally:
        await scaler.close()
