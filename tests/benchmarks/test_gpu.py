"""The GPU programme: every part runs in a rehearsal on this CPU, and nothing that breaks passes."""

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def programme() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module("benchmarks.gpu.programme")
    sys.path[:] = before


def programme_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *arguments]


def run(*arguments: str, seconds: float = 380.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        programme_command(*arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the programme itself is run")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
@pytest.mark.timeout(900)
def test_the_whole_programme_is_rehearsed(programme: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("first", "second", "--tiny", "--device", "cpu", "--out", str(out), seconds=890)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    ends = {row["part"]: row["ended"] for row in rows if "ended" in row}
    assert ends == {part.name: "passed" for part in programme.PARTS}

    figures = {row["figure"] for row in rows if "figure" in row}
    expected = {
        "modules of Ullage", "tests that passed", "served", "workers replaced",
        "memory of a fake GPU is read",
        "two kills: next token after kill 2", "sequences swapped out",
        "900 tokens served by large", "mxfp4 experts, 65 tokens", "int8, 3 x 40, top-p",
    }  # fmt: skip
    assert expected <= figures, sorted(figures)
    assert (out / "vram.csv").stat().st_size > 0
    assert "all passed" in done.stdout

    # Parts that passed do not run again.
    began = time.monotonic()
    again = run("first", "second", "--tiny", "--device", "cpu", "--out", str(out), "--pack")
    assert again.returncode == 0
    assert len(list(out.iterdir())) <= 8, "as many files as some machines give back"
    assert again.stdout.count("passed before") == len(programme.PARTS), again.stdout
    assert time.monotonic() - began < 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("first", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    is_for_cpus = torch.version.cuda is None
    assert ("torch here is without CUDA" if is_for_cpus else "finds no GPU") in done.stderr
    assert "--tiny --device cpu" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["third"], "there is no part 'third'; choose from machine, rates"),
        (["first", "--device", "cpu"], "--device cpu takes hours at full size; add --tiny"),
        (["table", "nowhere.jsonl"], "table needs one results.jsonl"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str) -> None:
    done = run(*arguments) if "--device" in arguments else run(*arguments, "--device", "cpu")
    assert done.returncode == 2
    assert message in done.stderr


PART = """
import os, signal, subprocess, sys
from benchmarks.gpu.figures import Fact, Figure, none_of

def run(job, report):
    {body}
"""


RUN_PARTS = """
import sys
from pathlib import Path
from benchmarks.gpu import programme
from benchmarks.gpu.figures import Job

root, out, scratch, limit_s, *names = sys.argv[1:]
programme.ROOT = Path(root)
wrong = programme.Part("wrong", 1, 20.0, "nothing")
parts = [wrong if name == "wrong" else programme.BY_NAME[name] for name in names]
job = Job("cpu", True, Path(out), Path(scratch), None)
sys.exit(0 if programme.run_parts(parts, job, float(limit_s), again=False) else 3)
"""


def write_part(folder: Path, body: str) -> None:
    """Write the part "wrong", in a package that children import instead of the real one."""
    package = folder / "benchmarks" / "gpu"
    package.mkdir(parents=True)
    for path in (ROOT / "benchmarks" / "gpu").glob("*.py"):
        (package / path.name).symlink_to(path)
    (package / "wrong.py").write_text(PART.format(body=body))


def run_parts(*names: str, root: Path, scratch: Path, limit_s: float) -> Path:
    """Run parts that do not pass; return the folder of their results.

    They run below a process of their own, because the programme ends all descendants of its
    process, and a soak may be among those of this one.
    """
    out = scratch / "out"
    out.mkdir()
    folders = map(str, (root, out, scratch))
    command = [sys.executable, "-c", RUN_PARTS, *folders, str(limit_s), *names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 3, done.stdout + done.stderr
    return out


BODIES = {
    "failed": "report(none_of('wrong answers', 1)); report(Figure('speed', 2.0, 'x', 1.0))",
    "crashed": "report(Figure('speed', 2.0, 'x', 1.0)); raise RuntimeError('no such kernel')",
    "crashed by a signal": "os.kill(os.getpid(), 11)",
    "silent": "report(Fact('nothing', 'was judged'))",
}

REASONS = {
    "crashed": "RuntimeError: no such kernel; see wrong.traceback.log",
    "crashed by a signal": "killed by SIGSEGV; see wrong.traceback.log",
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_part_that_proves_nothing_does_not_pass(kind: str, tmp_path: Path) -> None:
    write_part(tmp_path, BODIES[kind])
    out = run_parts("wrong", "machine", root=tmp_path, scratch=tmp_path, limit_s=12.0)
    rows = rows_of(out)
    ended = next(row for row in rows if row["part"] == "wrong" and "ended" in row)
    assert ended["ended"] == ("crashed" if kind.startswith("crashed") else "failed")
    if kind == "failed":
        assert [
            row["passes"] for row in rows if row.get("part") == "wrong" and "figure" in row
        ] == [
            False,
            True,
        ]
    assert REASONS.get(kind, "") in ended["message"]
    has_traceback = (out / "wrong.traceback.log").exists()
    assert has_traceback == kind.startswith("crashed")
    # The next part had its turn.
    assert any(row["part"] == "machine" for row in rows)


def test_what_a_hung_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    """A grandchild in its own session ignores SIGTERM, as a worker in a driver's call does."""
    pid_file = tmp_path / "pid"
    stubborn = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    )
    body = (
        f"subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True); "
        "report(Figure('before', 1.0, '', 1.0)); signal.pause()"
    )
    write_part(tmp_path, body)
    out = run_parts("wrong", root=tmp_path, scratch=tmp_path, limit_s=6.0)
    rows = rows_of(out)
    assert rows[-1]["ended"] == "timed out"
    assert "wrong.traceback.log" in rows[-1]["message"]
    assert "in run" in (out / "wrong.traceback.log").read_text(), "where it hung"
    figures = [row["figure"] for row in rows if "figure" in row]
    assert figures == ["before"], "what was found before the limit is kept"
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_logs_are_packed_once_each(programme: Any, tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import pack_logs

    (tmp_path / "results.jsonl").write_text("{}")
    for name, text in (("first", "old"), ("second", "x"), ("first", "new")):
        (tmp_path / f"{name}.log").write_text(text)
        pack_logs(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["logs.tar.gz", "results.jsonl"]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert archive.getnames() == ["first.log", "second.log"]
        newest = archive.extractfile("first.log")
        assert newest is not None
        assert newest.read() == b"new"


def test_kernels_are_packed_for_the_next_machine(
    programme: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.gpu.__main__ import pack_kernels

    cache = tmp_path / "cache"
    out = tmp_path / "out"
    out.mkdir()
    (cache / "hash").mkdir(parents=True)
    for suffix in ("cubin", "json", "ttir"):
        (cache / "hash" / f"kernel.{suffix}").write_text(suffix)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    pack_kernels(out)
    with tarfile.open(out / "triton-cache.tar.gz") as archive:
        assert archive.getnames() == ["hash/kernel.cubin", "hash/kernel.json"]


def test_what_a_rehearsal_passed_is_run_at_full_size(programme: Any, tmp_path: Path) -> None:
    from benchmarks.gpu.figures import Results

    results = Results(tmp_path)
    results.end("machine", "passed", 1.0, tiny=True)
    results.end("rates", "passed", 1.0, tiny=False)
    results.end("steps", "passed", 1.0, tiny=False)
    results.end("steps", "failed", 1.0, tiny=False)
    assert programme.passed_before(results, tiny=True) == {"machine"}
    assert programme.passed_before(results, tiny=False) == {"rates"}


def test_folders_of_killed_runs_are_removed(programme: Any, tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import SCRATCH, remove_abandoned

    abandoned = tmp_path / f"{SCRATCH}a"
    used = tmp_path / f"{SCRATCH}b"
    for folder in (abandoned, used):
        folder.mkdir()
        (folder / "model").write_text("x")
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [used.name]
    os.close(descriptor)
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_parts_without_time_are_told(tmp_path: Path) -> None:
    out = run_parts("machine", root=ROOT, scratch=tmp_path, limit_s=1.0)
    assert rows_of(out)[-1]["ended"] == "not run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_programme_and_its_parts(number: int, tmp_path: Path) -> None:
    arguments = ("soak", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out"))
    with subprocess.Popen(
        programme_command(*arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert "soak" in process.stdout.readline()
        # Until the part has started a process, too.
        while len(started := psutil.Process(process.pid).children(recursive=True)) < 2:
            os.sched_yield()
        os.killpg(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def test_near_ties_are_told_from_other_tokens(programme: Any) -> None:
    from benchmarks.gpu.ties import Pair, compare

    wanted = [1, 2, 3]
    gaps = [1.0, 1e-6, 1.0]
    for given, parted in [
        ([1, 2, 3], (0, 0)),
        ([1, 2], (0, 0)),
        ([1, 9, 9], (0, 1)),
        ([1, 2, 9], (1, 0)),
    ]:
        assert compare([Pair(wanted, gaps, given)]) == parted, given
    assert compare([Pair(wanted, gaps, [1, 2, 9])], near=2.0) == (0, 1)


def test_the_table_tells_the_last_run_of_each_part() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.gpu.table import markdown
    finally:
        sys.path.remove(str(ROOT))

    def figure(part: str, value: float, passes: bool) -> dict[str, Any]:
        return {
            "part": part, "figure": "share", "value": value, "unit": "of it", "aim": 0.5,
            "is_limit": False, "passes": passes,
        }  # fmt: skip

    def end(part: str, ended: str) -> dict[str, Any]:
        return {"part": part, "ended": ended, "seconds": 3.0, "message": ""}

    def begin(part: str) -> dict[str, Any]:
        return {"part": part, "began": 60.0}

    rows = [
        begin("steps"),
        figure("steps", 0.2, False),
        end("steps", "failed"),
        begin("steps"),
        figure("steps", 0.7, True),
        begin("mixed"),
        figure("mixed", 0.1, False),
        end("steps", "passed"),
        end("steps", "not run"),
    ]
    table = markdown(rows)
    assert "| steps | passed | 3 | share 0.7 of it (≥ 0.5) |" in table
    assert "| mixed | cut | 0 | **share 0.1 of it (≥ 0.5)** |" in table
