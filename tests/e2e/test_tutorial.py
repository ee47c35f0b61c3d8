"""The tutorial, as a newcomer follows it: each command of the page runs and prints what it shows.

`…` on the page stands for any output. Numbers differ from run to run, except statuses of HTTP.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ullage_testing.local_service import end
from ullage_testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "tutorial.md").read_text(encoding="utf-8")
PATIENCE_S = 120.0

PARTS = re.compile(
    r"^```(?P<kind>\w*)\n(?P<block>.*?)^```|<(?P<link>http://\S+)>", re.MULTILINE | re.DOTALL
)
SUBSTITUTES = {
    "make install": "make --dry-run --silent install > make.log; rm make.log",
    "source .venv/bin/activate": "true",
    "/tmp/tutorial": '"$FOLDER"',
}
"""Tests run in the environment that `make install` makes, and leave nothing in /tmp/tutorial."""

VARIABLE = re.compile(
    r"(?P<any>…)"
    r"|(?P<status>\b(?:200|400|429)\b)"
    r"|(?P<time>\d{4}-\d\d-\d\dT\S+)"
    r"|(?P<hash>\b[0-9a-f]{16}\b)"
    r"|(?P<number>[-+]?\d[\d.]*(?: [KMG]?i?B\b)?)"
    r"|(?P<bar>[█▓▒░]{2,})"
    r"|(?P<space>\s+)"
)
PATTERNS = {
    "any": r".*?",
    "time": r"\S+",
    "hash": r"[0-9a-f]{16}",
    "number": r"[-+]?\d[\d.]*(?: [KMG]?i?B\b)?",
    "bar": r"[█▓▒░]+",
    "space": r"\s+",
}
"""Patterns of output that differs from run to run, by the groups of VARIABLE."""


def pattern_of(shown: str) -> str:
    """Return a pattern that matches the output that the page shows, with other numbers."""
    pattern = ""
    end_of_last = 0
    for match in VARIABLE.finditer(shown):
        pattern += re.escape(shown[end_of_last : match.start()])
        pattern += PATTERNS.get(match.lastgroup or "", match[0])
        end_of_last = match.end()
    return pattern + re.escape(shown[end_of_last:])


def assert_as_shown(shown: str, output: str, command: str) -> None:
    pattern = rf"\s*{pattern_of(shown.strip())}\s*"
    assert re.fullmatch(pattern, output, re.DOTALL), (
        f"{command}\nshows on the page:\n{shown}\nand here:\n{output}"
    )


def steps() -> Iterator[tuple[str, str]]:
    """Yield each command of the page, and the output that the page shows, in their order.

    `yaml` is the command of a manifest, `look` that of other blocks, `GET URL` that of a link.
    """
    for part in PARTS.finditer(PAGE):
        if part["link"]:
            yield f"GET {part['link']}", ""
        elif part["kind"] != "console":
            yield part["kind"] or "look", part["block"]
        else:
            for each in re.split(r"^(?=\$ |\^C$)", part["block"], flags=re.MULTILINE):
                command, _, shown = each.partition("\n")
                if command:
                    yield command.removeprefix("$ "), shown


class Terminal:
    """A shell that keeps its functions and its folder from command to command."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def run(self, command: str) -> str:
        """Return the output of a command."""
        assert self._bash.stdin
        assert self._bash.stdout
        self._bash.stdin.write(f"{command}\nprintf '\\n\\0\\n'\n")
        self._bash.stdin.flush()

        output = ""
        watchdog = threading.Timer(PATIENCE_S, self._bash.kill)
        watchdog.start()
        while not output.endswith("\n\0\n"):
            line = self._bash.stdout.readline()
            assert line, f"{command} ended the shell:\n{output}"
            output += line
        watchdog.cancel()
        return output.removesuffix("\n\0\n")

    def close(self) -> None:
        self._bash.communicate()


class Newcomer:
    """Follows the page with two terminals: `ullage up` has the first one, a shell the second.

    Args:
        folder: of all files; its path is short, for sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "up.log"
        self._up: subprocess.Popen[bytes] | None = None
        self._ports = {"8000": str(free_port()), "9000": str(free_port())}

        programs = Path(sys.executable).parent
        self._environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "FOLDER": str(folder),
            "TMPDIR": str(folder),  # `ullage trace` sees no other service of this machine
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "160",
        }
        self._environment.pop("MAKEFLAGS", None)  # this test may itself be run by make
        self._shell = Terminal(self._environment)

    def follow(self, step: str, shown: str) -> str:
        """Take a step of the page, and return its output."""
        if step == "yaml":
            (self._folder / "tutorial.yaml").write_text(shown, encoding="utf-8")
            return shown
        if step == "look":
            wait_until(lambda: re.search(pattern_of(shown.strip()), self._output(), re.DOTALL))
            return shown
        if step == "^C":
            return self._interrupt()

        command = self._here(step)
        if command.startswith("GET "):
            page = httpx.get(command.removeprefix("GET "), trust_env=False)
            assert page.headers["content-type"].startswith("text/html")
            return ""
        if command.startswith("ullage up "):
            return self._start(command)
        if command.startswith("ullage top "):
            command += f" --url http://127.0.0.1:{self._ports['8000']}"
        for theirs, ours in SUBSTITUTES.items():
            command = command.replace(theirs, ours)

        if self._up and self._up.poll() is None:
            wait_until(self._is_idle)  # a newcomer types slowly
        return self._shell.run(command)

    def _here(self, text: str) -> str:
        """Return a text with the ports of this run."""
        for theirs, ours in self._ports.items():
            text = text.replace(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}")
        return text

    def _start(self, command: str) -> str:
        command += f" --http-port {self._ports['8000']} --grpc-port {self._ports['9000']}"
        with self._log.open("wb") as log:
            self._up = subprocess.Popen(
                command.split(), cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )
        wait_until(lambda: "Ctrl-C stops it." in self._output() or self._up.poll() is not None)
        return self._output()

    def _output(self) -> str:
        """Return the first terminal's output so far."""
        return self._log.read_text(encoding="utf-8")

    def _is_idle(self) -> bool:
        """Return whether the router knows that all memory is free again."""
        stats = httpx.get(f"http://127.0.0.1:{self._ports['8000']}/stats", trust_env=False).json()
        return all(
            engine["headroom_bytes"] == engine["kv_pool_bytes"] for engine in stats["engines"]
        )

    def _interrupt(self) -> str:
        """Press Ctrl-C in the first terminal, and return its output from then on."""
        assert self._up
        before = self._output()
        self._up.send_signal(signal.SIGINT)
        assert self._up.wait(PATIENCE_S) == 0
        return self._output().removeprefix(before)

    def close(self) -> None:
        """Leave no process behind."""
        if self._up:
            end(self._up)
        self._shell.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as folder:
        made = Newcomer(Path(folder))
        yield made
        made.close()


def test_every_command_of_the_tutorial_prints_what_the_page_shows(newcomer: Newcomer) -> None:
    for step, shown in steps():
        began = time.monotonic()
        assert_as_shown(shown, newcomer.follow(step, shown), step)
        print(f"{time.monotonic() - began:5.1f} s  {step[:80]}")
