"""The soak of KV tiers runs, and its checks find what they are for."""

import importlib
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20


@pytest.fixture(scope="module")
def soak() -> Any:
    return importlib.import_module("benchmarks.soak")


def seen(soak: Any, **changes: list[float]) -> Any:
    """Return a soak of 400 samples that passes every check, except for these columns."""
    row = {
        **dict.fromkeys(("worker", "server", "files", "host", "file"), 100.0 * MIB),
        "kv_pool": 60.0 * MIB,
        "kv_used": 0.0,
        "restarts": 1.0,
        "failures": 0.0,
        "host_hits": 1.0,
        "file_hits": 1.0,
    }
    run = soak.Soak([], random.Random(1), after_kill={"host": 16}, killed_s=200.0)
    run.cached_by_tier = dict.fromkeys(("device", "host", "file"), 16)
    run.answers_at_kill = 200
    run.samples = [
        {"s": float(n), "answers": n, **row, **{name: each[n] for name, each in changes.items()}}
        for n in range(400)
    ]
    return run


def test_a_soak_that_is_well_has_no_faults(soak: Any) -> None:
    assert soak.faults(seen(soak), 20.0) == []


@pytest.mark.parametrize(
    ("column", "values", "fault"),
    [
        ("worker", [1400 * MIB] * 400, "the worker takes more than 85%"),
        ("worker", [(100 + n) * MIB for n in range(400)], "the worker grows by"),
        ("server", [(100 + n) * MIB for n in range(400)], "the server grows by"),
        ("files", [n * MIB for n in range(400)], "files exceed their quota"),
        ("kv_pool", [60 * MIB + n for n in range(400)], "the KV pool is not constant"),
        ("failures", [1] * 400, "blocks of KV failed"),
        ("restarts", [0] * 400, "the killed worker is not replaced"),
    ],
)
def test_what_grows_or_fails_is_named(
    soak: Any, column: str, values: list[float], fault: str
) -> None:
    (problem,) = soak.faults(seen(soak, **{column: values}), 20.0)
    assert problem.startswith(fault)


def test_what_clients_met_is_named(soak: Any, tmp_path: Path) -> None:
    run = seen(soak)
    run.errors = ["session 1: gone"]
    run.after_kill = {}
    run.e2e_s = [30.0]
    run.cached_by_tier = {"device": 16}
    run.shared_files = {str(tmp_path), str(tmp_path / "gone")}
    problems = soak.faults(run, 20.0)
    assert problems[:2] == ["session 1: gone", f"files stay in /dev/shm: {[str(tmp_path)]}"]
    assert problems[2:] == [
        "p95 of whole answers exceeds 20 s",
        "sessions of the killed worker are not there",
        "nothing was cached on host",
        "nothing was cached on file",
    ]


def test_a_worker_that_nobody_killed_may_not_die(soak: Any) -> None:
    run = seen(soak)
    run.killed_s = None
    assert soak.faults(run, 20.0) == ["a worker died by itself"]


def test_memory_of_loading_is_no_growth_and_a_short_life_is_not_judged(soak: Any) -> None:
    loading = [(10 if n < 3 or 200 < n < 203 else 100) * float(MIB) for n in range(400)]
    assert soak.growth(seen(soak, worker=loading), "worker") == 0.0
    run = seen(soak, worker=[0.0] * 390 + [100.0 * MIB] * 10)
    assert soak.faults(run, 20.0) == ["the worker lived too briefly to judge its growth"]


def test_it_ends_when_its_time_has_passed_and_each_tier_was_used(soak: Any) -> None:
    run = seen(soak)
    assert not soak.is_enough(run, 59.0, 60.0)
    assert soak.is_enough(run, 60.0, 60.0)
    run.cached_by_tier.pop("file")
    assert not soak.is_enough(run, 60.0, 60.0)
    assert soak.is_enough(run, 60.0 + soak.LATER_S, 60.0)


@pytest.mark.timeout(1000)
def test_two_minutes_of_the_real_model(two_minutes: Any) -> None:
    two_minutes.process.wait(900)
    # A process that somebody else waited for has the return code 0, too.
    is_written = (two_minutes.folder / "soak.json").exists()
    assert two_minutes.process.returncode == 0, two_minutes.errors()
    assert is_written, two_minutes.errors()
    row = json.loads((two_minutes.folder / "soak.json").read_text())
    assert row["seconds"] >= 118
    assert all(row["cached_tokens"][tier] > 0 for tier in ("device", "host", "file"))
    plot = ET.parse(two_minutes.folder / "soak.svg")
    assert len(list(plot.iter("{http://www.w3.org/2000/svg}polyline"))) == 7
