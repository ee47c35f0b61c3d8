"""Makes each client's environment once, and keeps it while its pins are unchanged."""

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ullage_clients.catalogue import NODE, ClientKind, JudgedClient, pin

STAMP = "pins.json"
"""File in an environment that is complete, with the pins that it was made of."""
INSTALL_TIMEOUT_S = 1200.0
PROGRESS_S = 20.0
"""Seconds between two lines about an installation that goes on."""
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""Versions of Python to look for, if this program's own is too old for a client."""
PROCESSORS = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
NODE_RUNTIME = "node"
"""Name of the environment with Node itself."""


class NotInstalled(Exception):
    """A client's environment cannot be made here. The message names the package and the log."""


class Environments:
    """Environments below one folder, one for each client.

    Args:
        folder: of all environments.
        vllm: of the environment of `make install-vllm`.
    """

    def __init__(self, folder: Path, vllm: Path) -> None:
        self._folder = folder
        self._vllm = vllm

    def command(self, client: JudgedClient) -> list[str]:
        """Return the command that runs a program with a client, whose environment is made first.

        Raises:
            NotInstalled: a package cannot be installed on this machine.
        """
        if client.kind == ClientKind.VLLM:
            python = self._vllm / "bin" / "python"
            if not python.exists():
                raise NotInstalled(f"{self._vllm.name} is absent: run make install-vllm")
            return [str(python)]

        home = self._folder / client.name
        if client.kind == ClientKind.PYTHON:
            self._make(home, pins_of_python(client))
            return [str(home / "bin" / "python")]

        self._make(home, {"npm": client.requirements})
        runtime = self._folder / NODE_RUNTIME
        package = node_package()
        self._make(runtime, {"npm": [f"{package}@{NODE}"]})
        return [str(runtime / "node_modules" / package / "bin" / "node")]

    def home(self, client: JudgedClient) -> Path:
        """Return the folder of a client's environment, and of the files of its runs."""
        return self._folder / client.name

    def version(self, client: JudgedClient) -> str:
        """Return the client's version: the pinned one, or that of the installed vLLM."""
        if client.requirements:
            return client.version
        paths = [str(path) for path in self._vllm.glob("lib/python*/site-packages")]
        installed = importlib.metadata.distributions(name="vllm", path=paths)
        return next((each.version for each in installed), "")

    def _make(self, home: Path, pins: Mapping[str, object]) -> None:
        """Install packages into a new environment, unless it has the same pins already."""
        stamp = home / STAMP
        text = json.dumps(pins, sort_keys=True)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == text:
            return

        print(f"{home.name}: installing ...", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        log = self._folder / f"{home.name}.log"
        log.unlink(missing_ok=True)
        for command in commands(home, pins):
            install(command, home, log)
        stamp.write_text(text, encoding="utf-8")


def pins_of_python(client: JudgedClient) -> Mapping[str, object]:
    """Return the pins of an environment for Python, with the Python that it is made with."""
    return {"python": find_python(client.python), "pip": client.requirements}


def find_python(oldest: tuple[int, int]) -> str:
    """Return a Python that is not older than this.

    Raises:
        NotInstalled: the machine has none.
    """
    if sys.version_info[:2] >= oldest:
        # That of a virtual environment would be a link into the environment.
        return str(Path(sys.base_prefix, "bin", "python3"))
    names = [f"python{major}.{minor}" for major, minor in PYTHONS if (major, minor) >= oldest]
    for name in names:
        path = shutil.which(name)
        # A shim of pyenv is there even if no version is chosen.
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    raise NotInstalled(f"it needs Python {oldest[0]}.{oldest[1]}, and none is in PATH")


def node_package() -> str:
    """Return the npm package that has Node's program for this machine.

    Raises:
        NotInstalled: Node is not packaged for the machine.
    """
    processor = PROCESSORS.get(platform.machine().lower())
    if sys.platform != "linux" or not processor:
        raise NotInstalled(f"npm has no Node for {sys.platform} on {platform.machine()}")
    return f"node-linux-{processor}"


def commands(home: Path, pins: Mapping[str, object]) -> list[list[str]]:
    """Return the commands that install an environment's packages."""
    if isinstance(requirements := pins.get("npm"), list | tuple):
        npm = ["npm", "install", "--no-audit", "--no-fund", "--save-exact", "--ignore-scripts"]
        return [[*npm, "--prefix", str(home), *requirements]]

    requirements = pins["pip"]
    assert isinstance(requirements, list | tuple)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--no-compile"]
    return [[str(pins["python"]), "-m", "venv", str(home)], [*pip, *requirements]]


def install(command: Sequence[str], home: Path, log: Path) -> None:
    """Run one command of an installation, with its output at the end of a log.

    Raises:
        NotInstalled: the command failed.
    """
    if not shutil.which(command[0]):
        raise NotInstalled(f"{command[0]} is not in PATH")
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = wait(process, home.name)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status is None:
        raise NotInstalled(f"no end after {INSTALL_TIMEOUT_S:.0f} s; see {log}")
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reason = next((line for line in reversed(lines) if "error" in line.lower()), "")
        named = ", ".join(word for word in command if is_pinned(word)) or home.name
        raise NotInstalled(f"{named}: {reason.strip() or f'exit status {status}'}; see {log}")


def wait(process: "subprocess.Popen[bytes]", name: str) -> int | None:
    """Return the status of an installation, or None if it takes too long. Print its progress."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < INSTALL_TIMEOUT_S:
        try:
            return process.wait(PROGRESS_S)
        except subprocess.TimeoutExpired:
            print(f"{name}: installing for {passed_s + PROGRESS_S:.0f} s", flush=True)
    return None


def is_pinned(word: str) -> bool:
    """Return whether a word of a command is a pinned requirement."""
    if word.startswith(("-", os.sep)):
        return False
    return "==" in word or "@" in word[1:]


def packages(client: JudgedClient) -> dict[str, str]:
    """Return the pinned version of each package of a client."""
    return dict(pin(requirement) for requirement in client.requirements)
