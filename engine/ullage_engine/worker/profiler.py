"""A look at the coming steps of a worker that goes on serving: torch's profiler, or a timeline of
how batches form. One at a time, and bounded: it ends by itself after its steps or seconds.

What is slow, writing the trace, happens in a thread, beside further steps.
"""

import gzip
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from ullage_common.process.memory import free_bytes, trim_heap
from ullage_engine.kernels.ranges import ranges
from ullage_engine.protocol.messages import ProfileDone, StartProfile
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.timeline import Timeline
from ullage_engine.protocol.worker_state import WorkerState

log = logging.getLogger("ullage.engine.worker.profiler")


MAX_GROWTH_BYTES = 64 << 20
"""Growth of the process at which it looks at no further step: about 300,000 events, which take
ten times as much until they are written. 30 layers are about 4,000 events a step."""


class _Recorder(Protocol):
    """What looks at steps from its making on."""

    @property
    def is_full(self) -> bool:
        """Whether it should look at no further step, since it holds as much as it may."""

    def on_state(self, state: WorkerState) -> None:
        """Take a report of memory and load."""

    def stop(self) -> None:
        """Look at no further step."""

    def write(self, path: Path) -> None:
        """Write what was seen, in any thread."""


class _Operations:
    """What torch computes, on the CPU and on its device; without shapes and stacks, which would be
    most of the cost."""

    def __init__(self) -> None:
        import torch
        from torch.autograd import profiler

        # Not torch.profiler, whose start imports torch's compiler: seconds without a step, and
        # 150 MB that stay.
        device = "cuda" if torch.cuda.is_available() else None
        make: Any = profiler.profile
        self._profile: Any = make(use_device=device, use_kineto=True)
        self._profile.__enter__()
        self._process = psutil.Process()
        self._resident_bytes = self._process.memory_info().rss
        self._max_growth = min(MAX_GROWTH_BYTES, free_bytes() // 20)
        ranges.to_profiler()

    @property
    def is_full(self) -> bool:
        """Whether there are so many events that it is to end: they take ten times the memory when
        it does."""
        return self._process.memory_info().rss - self._resident_bytes > self._max_growth

    def on_state(self, state: WorkerState) -> None: ...

    def stop(self) -> None:
        ranges.restore()
        self._profile.__exit__(None, None, None)

    def write(self, path: Path) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="ullage-profile-") as folder:
                plain = Path(folder, "trace.json")
                self._profile.export_chrome_trace(str(plain))
                with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as file:
                    shutil.copyfileobj(source, file)
        finally:
            self._profile = None
            trim_heap()  # a worker's heap keeps what is freed, and steps have no use for as much


class _Batches:
    """Which requests are in which steps."""

    def __init__(self, events: RequestEvents) -> None:
        self._events = events
        self._timeline = Timeline(time.time())
        events.record_to(self._timeline)

    @property
    def is_full(self) -> bool:
        return False

    def on_state(self, state: WorkerState) -> None:
        values = {
            "requests running": state.num_running,
            "requests waiting": state.num_waiting,
            "KV used MiB": state.kv_held_bytes / (1 << 20),
        }
        self._timeline.add_counters(time.time(), values)

    def stop(self) -> None:
        self._events.record_to(None)

    def write(self, path: Path) -> None:
        self._timeline.write(path)


class Profile:
    """One look at a worker, from its start to the file.

    Args:
        events: the requests that the worker has.
        num_steps: what the worker's counter of steps says now.
    """

    def __init__(self, start: StartProfile, events: RequestEvents, num_steps: int) -> None:
        self._start = start
        self._first_step = num_steps
        self._until = time.monotonic() + start.seconds
        self._num_steps = 0
        self._writing: threading.Thread | None = None
        self._error = ""
        self._recorder: _Recorder = (
            _Operations() if start.kind == "operations" else _Batches(events)
        )

    def on_state(self, state: WorkerState) -> None:
        """Take a report of memory and load."""
        if self._writing is None:
            self._recorder.on_state(state)

    def stop_soon(self) -> None:
        """End the look when `advance` is called next."""
        self._until = 0.0

    def advance(self, num_steps: int) -> ProfileDone | None:
        """End the look when it is time to; return the answer when the file is there."""
        if self._writing is None:
            self._num_steps = num_steps - self._first_step
            if self._recorder.is_full:
                log.warning("a profile ends early: its events took the memory that they may have")
                if not self._num_steps:
                    self._error = "there is too little memory to look at a step; free some"
                self.stop()
            elif self._num_steps >= self._start.steps or time.monotonic() >= self._until:
                self.stop()
            return None
        if self._writing.is_alive():
            return None
        return ProfileDone(num_steps=self._num_steps, error=self._error)

    def stop(self) -> None:
        """Look at no further step, and begin to write what was seen."""
        if self._writing is not None:
            return
        self._recorder.stop()
        self._writing = threading.Thread(target=self._write, name="write profile", daemon=True)
        self._writing.start()

    def _write(self) -> None:
        try:
            self._recorder.write(Path(self._start.path))
        except Exception as error:  # a full disk, say: serving goes on
            log.exception("a profile cannot be written")
            self._error = f"{type(error).__name__}: {error}"
