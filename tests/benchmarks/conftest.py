"""The soak of two minutes, which runs in parallel with the other tests."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = "test_two_minutes_of_the_real_model"


@dataclass(frozen=True)
class TwoMinutes:
    """A soak whose clients mostly sleep."""

    process: subprocess.Popen[bytes]
    folder: Path

    def errors(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")


SOAK = pytest.StashKey[TwoMinutes]()
FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the soak with the first test of a run, to overlap its two minutes with other tests."""
    is_wanted = any(item.name == TEST for item in session.items)
    if not is_wanted or session.config.option.collectonly:
        return
    session.config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="soak")
    folder = Path(session.config.stash[FOLDER].name)
    command = [sys.executable, "-m", "benchmarks", "soak", "--minutes=2", "--kv-mib=12"]
    command += ["--pause-s=10", "--no-kill", "--e2e-s=300"]
    command += [f"--json={folder / 'soak.json'}", f"--plot={folder / 'soak.svg'}"]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
    session.config.stash[SOAK] = TwoMinutes(process, folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End a soak whose test was not reached, with its service."""
    if soak := session.config.stash.get(SOAK, None):
        if soak.process.poll() is None:
            soak.process.terminate()
            soak.process.wait(120)
        session.config.stash[FOLDER].cleanup()


@pytest.fixture
def two_minutes(pytestconfig: pytest.Config) -> TwoMinutes:
    return pytestconfig.stash[SOAK]
