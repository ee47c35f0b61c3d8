"""A worker process, seen from its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """A started process; its standard streams are the parent's.

    Start it on the main thread: the kernel kills a worker that asked for it when the *thread* that
    started it ends. subprocess.Popen and not asyncio's: it uses vfork, so gRPC's fork handlers,
    which cannot cope with running threads, are never called.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(command, env={**os.environ, **environment})

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit status; minus the signal's number when one killed the process."""
        return await asyncio.to_thread(self._process.wait)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
