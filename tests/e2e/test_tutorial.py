"""The tutorial, as a newcomer follows it: each command of the page runs, and prints what it shows.

In the page `…` stands for any output. Numbers differ from run to run, except statuses of HTTP.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from ullage_testing.local_service import end
from ullage_testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "tutorial.md").read_text(encoding="utf-8")
PATIENCE_S = 120.0

MANIFEST = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"^```(console|)\n(.*?)^```|<(http://127\S+)>", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(
    r"(?P<any>…)"
    r"|(?P<status>\b(?:200|400|429)\b)"
    r"|(?P<hash>\b[0-9a-f]{16,}\b)"
    r"|(?P<time>\d{4}-\d\d-\d\dT\S+)"
    r"|(?P<number>-?\d[\d.]*(?: [KMG]?i?B\b)?)"
    r"|(?P<bar>[█▓▒░]{2,})"
    r"|(?P<space>\s+)"
)
ANY = {
    "any": r".*?",
    "hash": r"[0-9a-f]+",
    "time": r"\S+",
    "number": r"-?\d[\d.]*(?: [KMG]?i?B\b)?",
    "bar": r"[█▓▒░]+",
    "space": r"\s+",
}
"""Patterns of output that differs from run to run, by the group of VARIABLE."""


@dataclass(frozen=True)
class Command:
    """A command of the page, `^C`, or a link for the browser; and the output that the page shows."""

    line: str
    shown: str


@dataclass
class Reader:
    """A newcomer with two terminals: `ullage up` has the first one, bash the second."""

    folder: Path
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self._up: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "up.log"
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=ROOT,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )

    def _environment(self) -> dict[str, str]:
        # `ullage` of this environment, and logs where no other service of this machine has some.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        temporary = self.folder / "tmp"
        temporary.mkdir()
        return os.environ | {"PATH": path, "TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"}

    def run(self, command: str) -> str:
        """Return the output of a command in the second terminal."""
        assert self._bash.stdin
        assert self._bash.stdout
        self._bash.stdin.write(f"{command}\nprintf '\\n\\0\\n'\n")
        self._bash.stdin.flush()
        lines = iter(self._bash.stdout.readline, "\0\n")
        return "".join(lines)

    def start(self, command: str) -> str:
        """Return the output of `ullage up`, once the service is ready."""
        ports = f" --http-port {self.http_port} --grpc-port {self.grpc_port}"
        with self._log.open("wb") as log:
            self._up = subprocess.Popen(
                ["bash", "-c", f"exec {command}{ports}"],
                cwd=self.folder / "tutorial",
                env=os.environ | {"PATH": self.run('printf "$PATH"').strip()} | self._tmp(),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + PATIENCE_S
        while "Ctrl-C stops it." not in (text := self.log()):
            assert self._up.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text

    def _tmp(self) -> dict[str, str]:
        return {"TMPDIR": str(self.folder / "tmp")}

    def log(self) -> str:
        """Return the first terminal's output so far."""
        return self._log.read_text(encoding="utf-8")

    def interrupt(self) -> str:
        """Press Ctrl-C in the first terminal; return the output from then on."""
        assert self._up
        before = len(self.log())
        self._up.send_signal(signal.SIGINT)
        assert self._up.wait(PATIENCE_S) == 0
        return self.log()[before:]

    def close(self) -> None:
        """End both terminals."""
        if self._up:
            end(self._up)
        end(self._bash)
        self._bash.communicate()
