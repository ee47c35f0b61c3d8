"""The comparison of a replay with a service: which errors are within their goals."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from benchmarks import replay

from ullage.headroom.v1 import headroom_pb2
from ullage_replay.play import Played, WatchedEngine
from ullage_replay.trace import TraceRequest

MIB = 1 << 20
REQUEST = TraceRequest(at=0.0, prompt_tokens=10, output_tokens=3)
TIMES = dict.fromkeys(("mean", "p50", "p95", "p99"), 0.1)


def played(**changes: Any) -> Played:
    fields: dict[str, Any] = {
        "ttft_s": 0.1,
        "end_s": 0.3,
        "output_tokens": 3,
        "action": "accept",
        "token_gaps_s": array("d", [0.1, 0.1]),
    }
    return Played(REQUEST, **(fields | changes))


def predicted(**changes: Any) -> dict[str, Any]:
    engine = {
        "pool": "single",
        "peak_kv_bytes": 20 * MIB,
        "peak_promised_bytes": 30 * MIB,
        "memory_bytes": 500 * MIB,
        "budget_bytes": 600 * MIB,
    }
    fields = {
        "ttft_s": TIMES,
        "inter_token_s": TIMES,
        "output_tokens_per_second": 10.0,
        "actions": {},
    }
    own = {name: value for name, value in changes.items() if name in engine}
    return fields | changes | {"engines": [engine | own]}


def compared(**changes: Any) -> dict[str, Any]:
    """Return the report of a service that did as predicted, but for some predictions."""
    watched = WatchedEngine(20 * MIB, 30 * MIB, 500 * MIB, 600 * MIB, 1)
    return replay.report_of([played()], {"single": watched}, predicted(**changes), 1.0)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"output_tokens_per_second": 20.0}, []),  # has no goal
        ({"peak_kv_bytes": 20 * MIB + MIB // 6}, []),
        ({"peak_kv_bytes": 20 * MIB + MIB // 4}, ["single peak_kv_bytes"]),
        ({"memory_bytes": 490 * MIB}, ["single memory_bytes"]),
        ({"ttft_s": TIMES | {"p95": 0.104}}, []),
        ({"ttft_s": TIMES | {"p95": 0.094}}, ["ttft_s p95"]),
        (
            {"inter_token_s": dict.fromkeys(TIMES, 0.2), "budget_bytes": MIB},
            [*(f"inter_token_s {each}" for each in TIMES), "single budget_bytes"],
        ),
    ],
)
def test_figures_beyond_their_goals_are_named(changes: dict[str, Any], names: list[str]) -> None:
    report = compared(**changes)
    assert report["missed"] == names
    assert as_last_line(report) == f"not within their goals: {', '.join(names) or 'none'}"
    json.dumps(report, allow_nan=False)


def as_last_line(report: dict[str, Any]) -> str:
    return replay.as_table(report).splitlines()[-1]


def test_the_table_has_the_goals() -> None:
    lines = replay.as_table(compared(peak_kv_bytes=34 * MIB)).splitlines()
    assert lines[0].split() == ["measured", "predicted", "error", "%", "goal", "%"]
    names = ("ttft_s p95", "tokens_per_second", "single peak_kv_bytes")
    rows = lines[1 : lines.index("")]
    cells = {name: line.split()[-2:] for line in rows for name in names if name in line}
    assert cells == {
        "ttft_s p95": ["0.0", "5"],
        "tokens_per_second": ["0.0", "-"],
        "single peak_kv_bytes": ["70.0", "1"],
    }


def test_memory_is_the_devices_and_peaks_are_the_engines_own() -> None:
    """Reports are too rare to see every peak, so the held bytes of a report are not compared."""
    report = headroom_pb2.Headroom(
        total_bytes=1000,
        threshold=0.5,
        kv_pool_bytes=100,
        kv_free_bytes=90,
        kv_peak_bytes=40,
        kv_peak_promised_bytes=60,
    )
    for name, num_bytes in (("weights", 200), ("kv_pool", 100), ("kv_host_tier", 64)):
        report.ledger.add(name=name, reserved_bytes=num_bytes, allocated_bytes=num_bytes)
    watched = WatchedEngine()
    watched.note(report)
    assert watched == WatchedEngine(40, 60, memory_bytes=300, budget_bytes=500, num_reports=1)


def test_zero_that_was_predicted_as_more_is_beyond_any_goal() -> None:
    assert replay.row(0, 5, 0.01)["error"] is None
    assert replay.missed({"x": replay.row(0, 5, 0.01), "y": replay.row(0, 0, 0.01)}) == ["x"]


def test_nothing_is_compared_where_no_request_was_answered() -> None:
    refused = played(ttft_s=None, output_tokens=0, token_gaps_s=array("d"), error="KV_HEADROOM")
    with pytest.raises(replay.ReplayError, match=r"the service has no ttft_s.*KV_HEADROOM"):
        replay.report_of([refused], {"single": WatchedEngine()}, predicted(), 1.0)
    with pytest.raises(replay.ReplayError, match="the replay has no inter_token_s"):
        compared(inter_token_s=None)


@pytest.mark.parametrize(("names", "status"), [([], 0), (["ttft_s p95"], 1)])
def test_the_exit_status_tells_whether_the_goals_are_met(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    status: int,
) -> None:
    changes = {"ttft_s": TIMES | {"p95": 0.2}} if names else {}
    path = tmp_path / "figures.json"
    monkeypatch.setattr(replay, "compare", lambda *_: compared(**changes))
    monkeypatch.setattr("sys.argv", ["replay", "--json", str(path)])
    assert replay.main() == status
    assert json.loads(path.read_text())["missed"] == names
    assert f"not within their goals: {', '.join(names) or 'none'}" in capsys.readouterr().out


def test_a_replay_that_fails_is_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hardware = tmp_path / "none.json"
    arguments = ["replay", "--only-replay", "--hardware", str(hardware), "--seconds", "5"]
    monkeypatch.setattr("sys.argv", arguments)
    assert replay.main() == 2
    error = capfd.readouterr().err
    assert "the replay ended with status" in error
    assert str(hardware) in error  # the command itself says why


def test_the_help_has_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["replay", "--help"])
    with pytest.raises(SystemExit):
        replay.main()
    assert "1 one is not" in " ".join(capsys.readouterr().out.split())
