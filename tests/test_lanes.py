"""Interrupted runs of tests leave no lane behind, and a cluster's run removes what it installed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0
# Instead of a Python with pytest: notes whom it runs for, and sleeps but where it ends at once.
STUB = """#!/usr/bin/env python3
import os, re, signal, sys
lane = re.search(r"cache_dir=\\S*/(\\w+)", " ".join(sys.argv)).group(1)
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND)
def note(word):
    flags = [name for name in ("KEEP", "INSTALLED") if os.environ.get(f"ULLAGE_E2E_{name}")]
    os.write(notes, f"{word} {lane} {os.getpid()} {'+'.join(flags)}\\n".encode())
def interrupted(number, frame):
    note("interrupted")
    sys.exit(2)
signal.signal(signal.SIGINT, interrupted) if signal.getsignal(signal.SIGINT) else None
note("began")
while lane not in ("chart", "end"):
    signal.pause()
note("ended")
"""


class Script:
    """A script under way whose Python is the stub."""

    def __init__(self, name: str, folder: Path) -> None:
        self._notes = folder / "notes"
        self._notes.touch()
        stub = folder / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        # A shell that was begun with SIGINT ignored could not catch it.
        command = ["env", "--default-signal=INT", f"scripts/{name}", str(stub)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ULLAGE_E2E_")}
        environment |= {"NOTES": str(self._notes), "TMPDIR": str(folder)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)

    def notes(self) -> list[list[str]]:
        """Lists words, lanes, process ids and what is set, in their order."""
        return [line.split(" ") for line in self._notes.read_text().splitlines()]

    def lanes(self, word: str) -> list[str]:
        return [lane for each, lane, *_ in self.notes() if each == word]

    def wait_begun(self, lanes: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not lanes <= set(self.lanes("began")):
            assert time.monotonic() < deadline and self.process.poll() is None, self.notes()
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)

    def running(self) -> list[int]:
        pids = {int(pid) for word, _, pid, _ in self.notes() if word == "began"}
        return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    scripts = list[Script]()

    def begin(name: str) -> Script:
        scripts.append(Script(name, tmp_path))
        return scripts[-1]

    yield begin
    for script in scripts:
        script.kill()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_run_on_a_cluster_ends_its_lanes_and_then_removes_everything(
    start: Callable[[str], Script], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script = start("e2e.sh")
    script.wait_begun({"faults", "rollouts", "others"})
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
    start: Callable[[str], Script], tmp_path: Path
) -> None:
    script = start("test.sh")
    script.wait_begun({"talking", "operating", "computing"})
    # As a terminal does: everything in the script's process group gets it.
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(PATIENCE_S) == 130
    assert not script.running()
    assert sorted(script.lanes("began")) == ["computing", "operating", "talking"]
    assert sorted(script.lanes("interrupted")) == ["computing", "operating", "talking"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "python"]
