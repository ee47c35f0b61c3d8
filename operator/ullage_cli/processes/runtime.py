"""Runs the pods of a plan as processes, and stops all of them when the service stops.

Pools are scaled with the same load reports and the same decision logic as in a cluster.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from ullage_cli.local.pods import Pod
from ullage_cli.local.ports import LOOPBACK
from ullage_cli.processes.pod_process import PodFailed, PodProcess
from ullage_cli.processes.readiness import wait_ready
from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.controller.autoscaler import Autoscaler, ScaledService

END_TIMEOUT_S = 20.0
"""Seconds to wait for all processes to exit once they have been told to stop."""

log = logging.getLogger(__name__)

SCALING_RETRY_S = 5.0
"""Seconds after an unexpected error until scaling goes on."""

OnProgress = Callable[[str, str], None]
"""Function that is called with a pod's name and its progress."""

OnScaled = Callable[[str, str], None]
"""Function that is called with a pool's name and a description of its new size."""


class LocalRuntime:
    """Runs all processes of one service.

    Args:
        pods: all pods that may run, including those that autoscaling may start later.
        run_dir: folder of the pods' logs.
        on_progress: called with the name and progress of each pod.
        sizes: initial number of running pods, by pool. A pool without an entry runs all its pods.
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
        """The process of each pod that should be running, even while it is being restarted."""
        return list(self._running.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[None]]:
        """Run all processes for the duration of the `async with` block.

        The block receives a future that never completes normally and raises `PodFailed` if a pod
        fails permanently. At the end of the block, routers stop before engines, so that running
        streams can finish without an error.
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
                # asyncio warns of an exception that was never retrieved, if nobody waited for it.
                self._failed.exception()

    async def scale(self, pool: str, size: int) -> None:
        """Resize a pool: start pods, or stop the last pods and wait until they have exited."""
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
        """Kill all processes immediately, without waiting for their grace periods."""
        for process in self.processes:
            process.kill()

    async def ready(self) -> None:
        """Wait until every running pod passes its readiness probe."""
        await asyncio.gather(*(self._ready(process.pod) for process in self.processes))

    async def _ready(self, pod: Pod) -> None:
        await wait_ready(pod)
        self._on_progress(pod.name, "ready")

    def _start(self, process: PodProcess) -> None:
        self._runs[process.pod.name] = asyncio.create_task(self._run(process))

    async def _end_runs(self) -> None:
        """Wait up to END_TIMEOUT_S for all processes to exit, then cancel their tasks."""
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=END_TIMEOUT_S)
        for run in self._runs.values():
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)

    async def _run(self, process: PodProcess) -> None:
        try:
            await process.run()
        except PodFailed as error:
            self._fail(process.pod, str(error))
        except Exception as error:
            # Nothing would read the pod's output or restart it any more.
            log.exception("supervising %s failed", process.pod.name)
            self._fail(
                process.pod,
                f"{type(error).__name__} while {process.pod.name} was supervised: {error}; this is "
                "a bug of Ullage, so please report it with the lines above",
            )

    def _fail(self, pod: Pod, reason: str) -> None:
        """Report that a pod will not run again. Only the first report counts."""
        assert self._failed is not None, "pods run inside `running`"
        if not self._failed.done():
            self._failed.set_exception(PodFailed(f"{pod.part}: {reason}"))

    def _process(self, pod: Pod) -> PodProcess:
        name = pod.name
        return PodProcess(
            pod, self._run_dir / f"{name}.log", lambda text: self._on_progress(name, text)
        )


def is_among(pods: Sequence[Pod], pod: Pod, sizes: Mapping[str, int]) -> bool:
    """Return whether a pod should be running, given the sizes of the pools.

    `sizes` maps pool names to sizes. A pool of size 2, for example, runs its first two pods. The
    result is always True for routers and for pods of pools that `sizes` does not list.
    """
    size = sizes.get(pod.part.removeprefix("pools."))
    mates = [each.name for each in pods if each.part == pod.part]
    return size is None or mates.index(pod.name) < size


async def keep_scaled(
    runtime: LocalRuntime,
    policies: Mapping[str, AutoscalingSpec],
    sizes: Mapping[str, int],
    metrics_port: int,
    on_scaled: OnScaled,
) -> None:
    """Scale the pools according to the router's load reports until cancelled.

    Args:
        runtime: the processes to scale.
        policies: autoscaling policies by pool.
        sizes: number of engines at the start, by pool.
        metrics_port: the router's loopback port for metrics.
        on_scaled: called before a pool's size changes.
    """
    changed = asyncio.Event()
    scaler: Autoscaler[str] = Autoscaler(lambda _: changed.set())
    followed = ScaledService(policies, (f"http://{LOOPBACK}:{metrics_port}",))
    present = dict(sizes)

    try:
        while True:
            # Clear the event before the decisions are read, so that none is missed while pods
            # start.
            changed.clear()
            try:
                for pool, decision in scaler.follow("", followed, sizes).pools.items():
                    count = decision.replicas
                    if count == present[pool]:
                        continue
                    on_scaled(pool, f"{count} engines ({decision.reason}: {decision.message})")
                    await runtime.scale(pool, count)
                    present[pool] = count
            except Exception:
                # Without scaling, a sleeping pool would never wake.
                log.exception("scaling failed; trying again in %g s", SCALING_RETRY_S)
                await asyncio.sleep(SCALING_RETRY_S)
            else:
                await changed.wait()
    finally:
        await scaler.close()
