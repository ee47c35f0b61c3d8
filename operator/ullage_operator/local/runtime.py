"""Runs the pods of a plan until told to stop; afterwards nothing of them is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
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
    """Owner of all processes of one service."""

    def __init__(self, pods: Sequence[Pod], run_dir: Path, on_progress: OnProgress) -> None:
        self.processes = [
            PodProcess(pod, run_dir / f"{pod.name}.log", self._reporter(pod.name, on_progress))
            for pod in pods
        ]
        self._on_progress = on_progress

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Starts every pod; inside, the yielded task ends only by `PodFailed`.

        On leaving, routers stop before engines so that streams end as answers and not as errors.
        """
        followed = asyncio.create_task(self._follow())
        try:
            yield followed
        finally:
            routers = [p for p in self.processes if "http" in p.pod.ports]
            engines = [p for p in self.processes if "http" not in p.pod.ports]
            for group in (routers, engines):
                await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in group))
            await asyncio.wait({followed}, timeout=STOP_GRACE_S)
            followed.cancel()
            with contextlib.suppress(asyncio.CancelledError, PodFailed):
                await followed

    async def ready(self) -> None:
        """Returns once every pod answers its readiness probe."""
        await asyncio.gather(*(self._ready(process.pod) for process in self.processes))

    async def _ready(self, pod: Pod) -> None:
        await wait_ready(pod)
        self._on_progress(pod.name, "ready")

    async def _follow(self) -> None:
        runs = [asyncio.create_task(self._run(process)) for process in self.processes]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run(self, process: PodProcess) -> None:
        try:
            await process.run()
        except PodFailed as error:
            raise PodFailed(f"{process.pod.part}: {error}") from error

    @staticmethod
    def _reporter(name: str, on_progress: OnProgress) -> Callable[[str], None]:
        return lambda text: on_progress(name, text)


def write_files(files: Sequence[File]) -> None:
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text, encoding="utf-8")
