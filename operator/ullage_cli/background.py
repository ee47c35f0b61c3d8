"""Runs a service in the background of a program, by `ullage up` in a child process.

The child keeps the service's event loop, signals and forks out of the program. Its standard input
is a pipe of which the program holds the other end, so that the service stops however the program
ends.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ullage_operator.api.errors import LocalFailure

STOP_TIMEOUT_S = 30.0
"""Seconds in which a service may stop by itself, before its processes are killed."""
KILL_TIMEOUT_S = 10.0
TAIL_LINES = 20
"""Number of output lines to show if the service ends without an error message."""

COLUMNS = "1000"
"""Width of the child's output, so that no line is wrapped."""
CACHE_FOLDERS = {"HF_HOME": "huggingface", "ULLAGE_S3_CACHE": "ullage/s3"}
"""Folders of fetched models below the user's cache folder, by the variable that names another."""
CLEAR = "\r\033[K"
"""Moves a terminal's cursor to the beginning of the line, and clears the line."""

_READY = "ready in "
_ERROR = "error: "
_PROGRESS = re.compile(r" *\d+\.\d s  (?P<text>.*)")
"""Matches a line in which `ullage up` prints the progress of a pod."""
_PERCENT = re.compile(r" \d+%$")

OnProgress = Callable[[str], None]

log = logging.getLogger(__name__)


class BackgroundService:
    """A service in a child process.

    Args:
        manifest: the file or the object of an LLMService.
        bases: files of the LLMServiceBases that it names.
        on_progress: called with a line of text whenever the progress of the start changes.
        secrets: folder with one folder per Secret that the manifest names, or None.

    state
        addresses and process ids of the ready service, as in state.json
    """

    def __init__(
        self,
        manifest: Path | Mapping[str, Any],
        bases: Sequence[Path] = (),
        on_progress: OnProgress | None = None,
        secrets: Path | None = None,
    ) -> None:
        self.state: dict[str, Any] = {}
        self._manifest = manifest
        self._bases = bases
        self._secrets = secrets
        self._output = _Output(on_progress or _ignore)
        self._stop: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the service, and wait until it is ready.

        Raises:
            LocalFailure: the service cannot run on this machine.
        """
        with tempfile.TemporaryDirectory(prefix="ullage-manifest-") as folder:
            state_file = Path(folder, "state.json")
            try:
                self._spawn(self._manifest_file(Path(folder)), state_file)
                self._output.wait_ready()
                if self.failure:
                    raise LocalFailure(self.failure)
                self.state = json.loads(state_file.read_text(encoding="utf-8"))
            except BaseException:
                self.close()
                raise

    @property
    def failure(self) -> str:
        """The reason why the service has ended (empty while it runs)."""
        return self._output.failure()

    def close(self) -> None:
        """Stop the service, and wait until its processes have ended."""
        self._stop()

    def _manifest_file(self, folder: Path) -> Path:
        if isinstance(self._manifest, Path):
            return self._manifest
        path = folder / "service.json"
        path.write_text(json.dumps(self._manifest), encoding="utf-8")
        return path

    def _spawn(self, manifest: Path, state_file: Path) -> None:
        command = [sys.executable, "-m", "ullage_cli.main", "up", "--until-eof"]
        command += ["-f", str(manifest), "--state-file", str(state_file)]
        command += ["--http-port", "0", "--grpc-port", "0"]
        for base in self._bases:
            command += ["--base", str(base)]
        if self._secrets:
            command += ["--secrets", str(self._secrets)]

        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**_caches(), **os.environ, "COLUMNS": COLUMNS},
            # Ctrl-C must end the program's own requests before the service stops.
            start_new_session=True,
        )
        assert process.stdout is not None
        reading = threading.Thread(
            target=self._output.read, args=(process.stdout,), name="ullage-up", daemon=True
        )
        # The finalizer also runs when the program exits, or drops the service.
        self._stop = weakref.finalize(self, _stop, process, reading, os.getpid())
        reading.start()


def _caches() -> dict[str, str]:
    """Return the variables that keep fetched models from one program to the next."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return {name: str(Path(folder, own)) for name, own in CACHE_FOLDERS.items()}


class _Output:
    """The output of `ullage up`, as a thread reads it.

    Args:
        on_progress: called with the progress of pods until the service is ready.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._is_ready = False
        self._has_ended = False
        self._changed = threading.Condition()

    def read(self, stream: IO[str]) -> None:
        """Read the output to its end."""
        try:
            with stream:
                for line in stream:
                    self._add(line.rstrip())
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until the service is ready or has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._has_ended)

    def failure(self) -> str:
        """Return the errors of the ended service, or its last lines if it printed none."""
        with self._changed:
            if not self._has_ended:
                return ""
            errors = [line for line in self._lines if line.startswith(_ERROR)]
            lines = [line.removeprefix(_ERROR) for line in errors or self._lines]
            return "\n".join(lines) or "ullage up has ended without an error message"

    def _add(self, line: str) -> None:
        progress = _PROGRESS.match(line)
        if progress and self._is_ready:
            log.warning("%s", progress["text"])
        elif progress:
            self._report(progress["text"])

        with self._changed:
            self._lines.append(line)
            self._is_ready = self._is_ready or line.startswith(_READY)
            self._changed.notify_all()

    def _report(self, text: str) -> None:
        try:
            self._on_progress(text)
        except Exception as error:
            # The program's output may be gone. The service must start nevertheless.
            log.warning("the progress of the start is not shown any more: %r", error)
            self._on_progress = _ignore


def _ignore(text: str) -> None:
    pass


def _stop(process: "subprocess.Popen[str]", reading: threading.Thread, owner: int) -> None:
    """Stop `ullage up`, by force if it takes too long.

    Args:
        process: the child.
        reading: the thread that reads the child's output.
        owner: process id of the program that started the child. Forks of the program do nothing.
    """
    if os.getpid() != owner:
        return

    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()

    # A signal kills the processes of a service that is stopping.
    for end_s, by_force in ((STOP_TIMEOUT_S, process.terminate), (KILL_TIMEOUT_S, process.kill)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(end_s)
            break
        by_force()
    process.wait()

    # The garbage collector may run this in the reading thread.
    if threading.current_thread() is not reading:
        reading.join()


class StatusLine:
    """Shows the progress of a start on standard error: one line on a terminal.

    Elsewhere a line is printed for each new stage of a pod, without percentages.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stages: dict[str, str] = {}
        """The last stage of each pod."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            with contextlib.suppress(OSError):  # the terminal is gone
                print(CLEAR, end="", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Show a line of text."""
        if self._is_terminal:
            print(f"{CLEAR}{text}", end="", file=sys.stderr, flush=True)
            return
        pod, _, progress = text.partition(": ")
        stage = _PERCENT.sub("", progress)
        if self._stages.get(pod) != stage:
            print(f"{pod}: {stage}", file=sys.stderr, flush=True)
        self._stages[pod] = stage
