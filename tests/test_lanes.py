"""Interrupted runs of tests leave no lane behind, and a cluster's run removes what it installed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0
# Instead of a Python with pytest: prints and notes whom it runs for, and sleeps or ends at once.
STUB = """#!/usr/bin/env python3
import os, re, signal, sys, time
lane = re.search(r"cache_dir=\\S*/(\\w+)", " ".join(sys.argv)).group(1)
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND)
def note(word):
    print(word, flush=True)
    flags = [name for name in ("KEEP", "INSTALLED") if os.environ.get(f"ULLAGE_E2E_{name}")]
    os.write(notes, f"{word} {lane} {os.getpid()} {'+'.join(flags)}\\n".encode())
def interrupted(number, frame):
    note("interrupted")
    sys.exit(2)
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, interrupted)
note("began")
# Not signal.pause(): a signal just before it would not end it.
while lane not in ("chart", "end"):
    time.sleep(0.02)
note("ended")
"""


class Script:
    """A script under way whose Python is the stub."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._notes = folder / "notes"
        self._notes.touch()
        stub = folder / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ULLAGE_E2E_")}
        environment |= {"NOTES": str(self._notes), "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [*command, str(stub)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def notes(self) -> list[list[str]]:
        """Lists words, lanes, process ids and what is set, in their order."""
        return [line.split(" ") for line in self._notes.read_text().splitlines()]

    def lanes(self, word: str) -> list[str]:
        return [lane for each, lane, *_ in self.notes() if each == word]

    def wait_begun(self, lanes: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not lanes <= set(self.lanes("began")):
            assert time.monotonic() < deadline, self.notes()
            assert self.process.poll() is None, self.notes()
            time.sleep(0.02)

    def stop_reading(self) -> None:
        assert self.process.stdout
        self.process.stdout.close()

    def kill(self) -> None:
        # Lanes have groups of their own within its session. Oldest first: nothing starts another.
        with self.process:
            for pid in psutil.pids():
                with suppress(ProcessLookupError):
                    if os.getsid(pid) == self.process.pid:
                        os.kill(pid, signal.SIGKILL)

    def running(self) -> list[int]:
        pids = {int(pid) for word, _, pid, _ in self.notes() if word == "began"}
        return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts = list[Script]()

    def begin(*command: str) -> Script:
        scripts.append(Script(tmp_path, *command))
        return scripts[-1]

    yield begin
    for script in scripts:
        script.kill()


@pytest.mark.parametrize(
    ("number", "status", "prefix", "is_read"),
    [
        (signal.SIGINT, 130, [], True),
        (signal.SIGINT, 130, [], False),  # as where Ctrl-C ends the other side of a pipe too
        (signal.SIGTERM, 143, ["env", "--ignore-signal=INT"], True),  # as in a script's background
        (signal.SIGHUP, 129, ["env", "--default-signal=HUP"], True),  # as after nohup
    ],
)
def test_an_interrupted_run_on_a_cluster_ends_its_lanes_and_then_removes_everything(
    start: Callable[..., Script],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    prefix: list[str],
    is_read: bool,
) -> None:
    script = start(*prefix, "scripts/e2e.sh")
    script.wait_begun({"faults", "rollouts", "others"})
    if not is_read:
        script.stop_reading()
    os.kill(script.process.pid, number)
    assert script.process.wait(PATIENCE_S) == status
    assert not script.running()
    assert sorted(script.lanes("interrupted")) == ["faults", "others", "rollouts"]
    assert [each[:2] for each in script.notes()[-2:]] == [["began", "end"], ["ended", "end"]]
    flags = {lane: names for word, lane, _, names in script.notes() if word == "began"}
    kept = dict.fromkeys(("faults", "rollouts", "others"), "KEEP+INSTALLED")
    assert flags == kept | {"chart": "KEEP", "end": "INSTALLED"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "python"]


def test_an_interrupted_run_of_all_tests_begins_no_further_lane(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    script = start("scripts/test.sh")
    script.wait_begun({"talking", "serving", "operating", "computing"})
    # As a terminal does: everything in the script's process group gets it.
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(PATIENCE_S) == 130
    assert not script.running()
    assert sorted(script.lanes("began")) == ["computing", "operating", "serving", "talking"]
    assert sorted(script.lanes("interrupted")) == ["computing", "operating", "serving", "talking"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "python"]
