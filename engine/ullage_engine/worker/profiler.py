"""Profiles the steps of a serving worker, with torch's profiler or as a timeline of batches.

A worker records one profile at a time, for a limited number of steps and seconds. Writing the trace
is slow and runs in a background thread.
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
"""Memory growth of the process in bytes at which recording stops, after about 300,000 events.

Events take ten times as much memory until they are written. A step of a 30-layer model has about
4,000 events.
"""


class _Recorder(Protocol):
    """The interface of recorders. A recorder starts recording steps as soon as it is created."""

    @property
    def is_full(self) -> bool:
        """Whether the recording must stop because its events have reached the memory limit."""

    def on_state(self, state: WorkerState) -> None:
        """Record the worker's current memory usage and load."""

    def stop(self) -> None:
        """Stop recording."""

    def write(self, path: Path) -> None:
        """Write the recording to a file. Any thread may call this method."""


class _Operations:
    """Records torch operations on the CPU and on the worker's device.

    Shapes and stack traces are not recorded, because they would cause most of the overhead.
    """

    def __init__(self) -> None:
        import torch
        from torch.autograd import profiler

        # torch.profiler would import torch's compiler at its start, which delays the next step by
        # seconds and keeps 150 MB.
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
        """Whether the process has grown by more than `MAX_GROWTH_BYTES` or 5 % of free memory."""
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
            # The heap keeps freed memory, and steps do not need that much.
            trim_heap()


class _Batches:
    """Records a timeline of batches: which requests each step computes."""

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
    """One profile of a worker, from the start of the recording until the file is written."""

    def __init__(self, start: StartProfile, events: RequestEvents, num_steps: int) -> None:
        """Start recording.

        Args:
            start: message with the profile's kind, length and file.
            events: lifecycle events of the worker's requests.
            num_steps: number of steps that the worker has computed so far.
        """
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
        """Record the worker's current memory usage and load."""
        if self._writing is None:
            self._recorder.on_state(state)

    def stop_soon(self) -> None:
        """Stop recording at the next call of `advance`."""
        self._until = 0.0

    def advance(self, num_steps: int) -> ProfileDone | None:
        """Stop recording if the profile is complete. Return the result once the file is written."""
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
        """Stop recording, and start writing the file in the background."""
        if self._writing is not None:
            return
        self._recorder.stop()
        self._writing = threading.Thread(target=self._write, name="write profile", daemon=True)
        self._writing.start()

    def _write(self) -> None:
        try:
            self._recorder.write(Path(self._start.path))
        # A failure, for example a full disk, must not end the worker.
        except Exception as error:
            log.exception("a profile cannot be written")
            self._error = f"{type(error).__name__}: {error}"
