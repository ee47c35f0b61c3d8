"""Runs the pods of a plan until told to stop; afterwards nothing of them is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from ullage_operator.local.plan import File
from ullage_operator.local.pods import Pod
from ullage_operator.local.process import PodFailed, PodProcess
from ullage_operator.local.readiness import wait_ready

# What a person at a terminal waits for. A pod drains for limits.requestTimeout, which may be
# longer: a local stop cuts off the answers that take longer than this.
STOP_GRACE_S = 20.0

OnProgress = Callable[[str, str], None]
"""Called with a pod's name and what it is doing."""


class LocalRuntime:
    """Owner of all processes of one service.

    Args:
        pods: all that may run.
        run_dir: where their logs go.
        on_progress: told what each does.
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
        """Of the pods that run."""
        return list(self._running.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Starts every pod; inside, the yielded task ends only by `PodFailed`.

        On leaving, routers stop before engines so that streams end as answers and not as errors.
        """
        self._failed = asyncio.get_running_loop().create_future()
        followed = asyncio.create_task(self._follow(self._failed))
        for process in self.processes:
            self._start(process)
        try:
            yield followed
        finally:
            routers = [p for p in self.processes if "http" in p.pod.ports]
            engines = [p for p in self.processes if "http" not in p.pod.ports]
            for group in (routers, engines):
                await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in group))
            await self._end_runs()
            followed.cancel()
            with contextlib.suppress(asyncio.CancelledError, PodFailed):
                await followed

    async def scale(self, pool: str, size: int) -> None:
        """Starts pods of a pool, or stops the last ones and waits for their end."""
        sizes = {pool: size}
        for pod in self._pods:
            if pod.part != f"pools.{pool}":
                continue
            wanted, process = is_among(self._pods, pod, sizes), self._running.get(pod.name)
            if wanted and process is None:
                self._running[pod.name] = self._process(pod)
                self._start(self._running[pod.name])
            elif process and not wanted:
                await process.stop(STOP_GRACE_S)
                await asyncio.gather(self._runs.pop(pod.name), return_exceptions=True)
                del self._running[pod.name]
                self._on_progress(pod.name, "asleep" if size == 0 else "stopped")

    async def ready(self) -> None:
        """Returns once every pod answers its readiness probe."""
        await asyncio.gather(*(self._ready(process.pod) for process in self.processes))

    async def _ready(self, pod: Pod) -> None:
        await wait_ready(pod)
        self._on_progress(pod.name, "ready")

    async def _follow(self, failed: "asyncio.Future[None]") -> None:
        await failed

    def _start(self, process: PodProcess) -> None:
        self._runs[process.pod.name] = asyncio.create_task(self._run(process))

    async def _end_runs(self) -> None:
        """After all were told to stop."""
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=STOP_GRACE_S)
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
