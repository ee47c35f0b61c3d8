"""Monitors the engine's GPUs to export metrics and to reduce the batch during throttling.

A thread queries the driver about once per second, and no other thread ever waits for it. If a
driver call hangs, the event loop continues, logs the hang, and stops exporting stale gauges.
"""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ullage_common.config.engine import ThrottlingSection
from ullage_engine.gpu.nvml import Gpu, GpuSample, Nvml, NvmlUnavailableError, XidEvents
from ullage_engine.gpu.throttling import MAX_GAP_S, BoostState, advance, counted_reasons

log = logging.getLogger("ullage.engine.gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorTimes:
    """Intervals and timeouts of the GPU monitor, in seconds."""

    interval_s: float = 1.0
    links_every_s: float = 10.0
    """Interval between samples that include NVLink counters.

    Reading these counters takes a driver call per link and error kind, and one for all fields.
    """
    silent_s: float = 10.0
    """Seconds without a response after which the driver is considered hung."""
    retry_s: float = 30.0
    """Seconds until the driver is opened again after a failure."""


class GpuMonitor:
    """Monitors one engine's GPUs on one node. Use it only in the event loop that started it.

    Args:
        num_gpus: number of GPUs that the engine uses on this node.
        throttling: the rules for reducing the batch.
        on_boost: called with the new state whenever the allowed fraction of the batch changes.
        times: the intervals.
    """

    def __init__(
        self,
        num_gpus: int,
        throttling: ThrottlingSection,
        on_boost: Callable[[BoostState], None],
        times: MonitorTimes = MonitorTimes(),
    ) -> None:
        self._num_gpus = num_gpus
        self._throttling = throttling
        self._on_boost = on_boost
        self._times = times
        self._boost = BoostState()
        self._sampled_at = time.monotonic()
        self._silence: asyncio.TimerHandle | None = None
        self._recovery: asyncio.TimerHandle | None = None
        """Timer that lets the batch grow again while there are no samples."""
        self._unavailable = ""
        """Why there are no samples, as logged, or "" if the driver has answered since then."""
        self.is_silent = False
        """Whether the driver is hung: it has not responded for `silent_s` seconds."""
        self._failures: set[tuple[str, str]] = set()
        """Failures already logged, as (GPU index, error) pairs."""
        self._stopping = threading.Event()
        self.samples: Sequence[GpuSample] = ()
        """The latest samples. Empty before the first sample and while the driver is hung."""
        self.xid_errors: Counter[tuple[str, str, int]] = Counter()
        """Number of Xid errors since startup, by GPU index, GPU UUID and error code."""

    def start(self) -> None:
        """Start the thread that queries the driver."""
        self._loop = asyncio.get_running_loop()
        self._await_answer()
        # A daemon thread, since the process may end while a call hangs.
        threading.Thread(target=self._ask_driver, name="nvml", daemon=True).start()

    def close(self) -> None:
        """Tell the thread to exit, without waiting for it."""
        self._stopping.set()
        for timer in (self._silence, self._recovery):
            if timer is not None:
                timer.cancel()

    # in the thread -------------------------------------------------------------------------------

    def _ask_driver(self) -> None:
        while not self._stopping.is_set():
            try:
                self._sample()
            except NvmlUnavailableError as error:
                self._post(self._on_unavailable, str(error))
            except Exception as error:  # serving goes on without the figures
                if repr(error) != self._unavailable:
                    log.exception("the GPU driver's answer cannot be used")
                self._post(self._on_unavailable, repr(error))
            self._stopping.wait(self._times.retry_s)

    def _sample(self) -> None:
        """Query the driver until the monitor is closed.

        Raises:
            NvmlUnavailableError: the driver cannot be used.
        """
        nvml = Nvml()
        gpus = nvml.gpus(os.environ, self._num_gpus)
        events = self._open_events(nvml, gpus)
        links_at = sampled_at = time.monotonic()
        with_links = True
        while not self._stopping.is_set():
            self._post(self._on_samples, [gpu.sample(with_links=with_links) for gpu in gpus])
            events = self._pause(events, sampled_at + self._times.interval_s)
            sampled_at = time.monotonic()
            with_links = sampled_at - links_at >= self._times.links_every_s
            links_at = sampled_at if with_links else links_at

    def _open_events(self, nvml: Nvml, gpus: list[Gpu]) -> XidEvents | None:
        try:
            return XidEvents(nvml, gpus)
        except NvmlUnavailableError as error:
            log.info("Xid errors are not available: %s", error)
            return None

    def _pause(self, events: XidEvents | None, until: float) -> XidEvents | None:
        """Wait until `until`, when the next sample is due, and report Xid errors in the meantime.

        Args:
            events: the stream of Xid errors, or None if the driver reports none.
            until: the time at which to return, on the clock `time.monotonic`.

        Returns:
            The stream to use for the next wait: `events`, or None if it has stopped working.
        """
        while events is not None and (left_s := until - time.monotonic()) > 0:
            try:
                event = events.wait(left_s)
            except NvmlUnavailableError as error:
                log.warning("Xid errors are not available any more: %s", error)
                events = None
            else:
                if event is not None:
                    self._post(self._on_xid, *event)
        self._stopping.wait(max(0.0, until - time.monotonic()))
        return events

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a call in the event loop. If the loop is closed, stop the thread."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._stopping.set()

    # in the event loop ---------------------------------------------------------------------------

    def _await_answer(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._loop.call_later(self._times.silent_s, self._on_silence)

    def _on_silence(self) -> None:
        self.is_silent = True
        self.samples = ()
        log.error(
            "the GPU driver does not answer, so the engine continues without figures of its GPUs",
            extra={"seconds": self._times.silent_s},
        )
        self._recover_unseen()

    def _on_unavailable(self, reason: str) -> None:
        if self._stopping.is_set():
            return
        if self._silence is not None:
            self._silence.cancel()
        self.is_silent = False
        self.samples = ()
        if reason != self._unavailable:
            self._unavailable = reason
            log.info("GPUs are not watched: %s", reason)
        self._recover_unseen()

    def _recover_unseen(self) -> None:
        """Let a reduced batch grow again while nothing is known of the GPUs."""
        if self._recovery is not None:
            self._recovery.cancel()
        if self._boost.is_off:
            self._judge((), MAX_GAP_S)
            self._recovery = self._loop.call_later(MAX_GAP_S, self._recover_unseen)

    def _on_xid(self, gpu: Gpu, number: int) -> None:
        if self._stopping.is_set():
            return
        key = (gpu.index, gpu.uuid, number)
        if not self.xid_errors[key]:  # a fault may repeat a thousand times
            extra = {"gpu": gpu.index, "uuid": gpu.uuid, "xid": number}
            log.error("the GPU reports Xid error %d", number, extra=extra)
        self.xid_errors[key] += 1

    def _on_samples(self, samples: list[GpuSample]) -> None:
        if self._stopping.is_set():
            return
        self._await_answer()
        self._unavailable = ""
        if self._recovery is not None:
            self._recovery.cancel()
        if self.is_silent:
            log.info("the GPU driver answers again")
        self.is_silent = False
        self.samples = samples
        self._log_failures(samples)
        now = time.monotonic()
        elapsed_s = now - self._sampled_at
        self._sampled_at = now
        if self._throttling.enabled:
            self._judge(samples, elapsed_s)

    def _log_failures(self, samples: Iterable[GpuSample]) -> None:
        """Log the driver errors in these samples, each error only once per GPU."""
        for sample in samples:
            for error in sample.failed_calls:
                if (sample.index, error) not in self._failures:
                    self._failures.add((sample.index, error))
                    extra = {"gpu": sample.index, "uuid": sample.uuid, "error": error}
                    log.warning("the GPU driver fails: %s", error, extra=extra)

    def _judge(self, samples: Iterable[GpuSample], elapsed_s: float) -> None:
        before = self._boost
        reasons = counted_reasons(self._throttling, (each.throttle_reasons for each in samples))
        self._boost = advance(self._throttling, before, reasons, elapsed_s)
        if self._boost.batch_share == before.batch_share:
            return
        extra = {
            "batch_share": round(self._boost.batch_share, 3),
            "reasons": sorted(self._boost.reasons or before.reasons),
        }
        if self._boost.batch_share < before.batch_share:
            log.warning("boost off: GPUs are throttled, so fewer sequences run", extra=extra)
        elif reasons is None:
            log.info("nothing is known of the GPUs' throttling, so more sequences run", extra=extra)
        elif self._boost.is_off:
            log.info("GPUs are not throttled any more, so more sequences run", extra=extra)
        else:
            log.info("boost on: GPUs are not throttled any more", extra=extra)
        self._on_boost(self._boost)
