"""`kubectl port-forward` as a context manager, for commands that connect to a cluster."""

import queue
import shutil
import subprocess
import threading
from collections import deque
from typing import IO

from ullage_operator.api.errors import LocalFailure

FORWARD_TIMEOUT_S = 20.0
"""Seconds to wait for kubectl to print the local address."""
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for kubectl to exit before it is killed, and for the end of its output."""
LAST_LINES = 20
"""Number of output lines to keep for an error message."""


class PortForward:
    """A `kubectl port-forward` process that is restarted if it exits.

    For example, kubectl exits when the target pod is replaced.

    Args:
        namespace: namespace of the target.
        target: pod or workload, for example pod/NAME or deployment/NAME.
        port: port of the target.
    """

    def __init__(self, namespace: str, target: str, port: int) -> None:
        self._command = ["kubectl", "--namespace", namespace, "port-forward", target, f":{port}"]
        self._process: subprocess.Popen[str] | None = None
        self._drains: tuple[_Drain, ...] = ()
        self._address = ""

    def __enter__(self) -> "PortForward":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def url(self) -> str:
        """Return the forwarded port's URL on this machine, starting kubectl if it is not running.

        Raises:
            LocalFailure: kubectl is not installed, or cannot forward the port.
        """
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._address = self._start()
        return self._address

    def _start(self) -> str:
        if shutil.which("kubectl") is None:
            raise LocalFailure(
                "kubectl is missing; install it, or forward the port yourself and pass its address"
            )

        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            self._command, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
        assert process.stdout
        assert process.stderr
        # kubectl prints a line for each connection, and would block if nobody read it.
        output = _Drain(process.stdout)
        errors = _Drain(process.stderr)
        self._drains = (output, errors)

        # Forwarding from 127.0.0.1:43211 -> 9090
        line = output.first_line(FORWARD_TIMEOUT_S)
        host, _, port = line.removeprefix("Forwarding from ").partition(" ")[0].rpartition(":")
        if not port.isdecimal():
            self._stop()
            said = " ".join(errors.text.split()) or "no error message"
            raise LocalFailure(f"{' '.join(self._command)}: {said}")
        return f"http://{host}:{port}"

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return

        self._process = None
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for drain in self._drains:
            drain.join(STOP_TIMEOUT_S)


class _Drain:
    """Reads a pipe to its end in a thread, and keeps the first line and the last ones."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._first: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="kubectl", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The last lines."""
        return "".join(self._last)

    def first_line(self, timeout_s: float) -> str:
        """Return the first line (empty if there is none in time). Call this only once."""
        try:
            return self._first.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the pipe, which a child of kubectl may still hold."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        with self._pipe:
            first = self._pipe.readline()
            self._last.append(first)
            self._first.put(first)
            self._last.extend(self._pipe)
