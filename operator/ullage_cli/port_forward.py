"""`kubectl port-forward` as a context manager, for commands that connect to a cluster."""

import select
import shutil
import subprocess

from ullage_operator.api.errors import LocalFailure

FORWARD_TIMEOUT_S = 20.0
"""Seconds to wait for kubectl to print the local address."""


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
            self._command, stdout=pipe, stderr=pipe, text=True
        )
        assert process.stdout
        assert process.stderr
        has_line, _, _ = select.select([process.stdout], [], [], FORWARD_TIMEOUT_S)
        line = process.stdout.readline() if has_line else ""

        # Forwarding from 127.0.0.1:43211 -> 9090
        host, _, port = line.removeprefix("Forwarding from ").partition(" ")[0].rpartition(":")
        if not port.isdecimal():
            process.terminate()
            said = " ".join(process.stderr.read().split()) or "no error message"
            raise LocalFailure(f"{' '.join(self._command)}: {said}")
        return f"http://{host}:{port}"

    def _stop(self) -> None:
        if process := self._process:
            self._process = None
            process.terminate()
            with process:
                pass  # waits for the process, and closes its pipes
