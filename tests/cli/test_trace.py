"""`ullage trace` joins the lines of all processes, from files and from kubectl."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ullage_cli.main import main

ARRIVED = 1_790_000_000.0


def line(at_ms: float, logger: str, **fields: Any) -> str:
    seconds, ms = divmod(at_ms, 1000)
    time = f"2026-09-21T14:13:{20 + int(seconds):02d}.{int(ms):03d}Z"
    return json.dumps({"time": time, "level": "info", "logger": logger, "message": "m", **fields})


def routers(name: str) -> list[str]:
    timeline = [
        {"event": "tokenised", "after_s": 0.001, "seconds": 0.001, "prompt_tokens": 9},
        {"event": "decided", "after_s": 0.0015, "admission_action": "accept", "route": "single"},
        {"event": "sent", "after_s": 0.0024, "engine": "chat-single-0"},
        {"event": "first_token", "after_s": 0.25},
    ]
    whole = {"arrived": ARRIVED, "timeline": timeline, "duration_s": 0.5, "status": 200}
    return [
        "not JSON, and no matter",
        line(1, "ullage_router.admission", request_id=name, event="decided", reason="FITS"),
        line(500, "ullage_router.server", request_id="another", event="finished"),
        line(500, "ullage_router.server", request_id=name, event="finished", **whole),
        f'["{name}"]',
        f'{{"request_id": "{name}", broken',
    ]


def engines(name: str) -> list[str]:
    server = "ullage.engine.requests"
    worker = "ullage.engine.worker.requests"
    return [
        line(2, server, request_id=name, event="received", prompt_tokens=9),
        line(3, worker, request_id=name, event="admitted"),
        line(10, worker, request_id=name, event="first_chunk", cached_tokens=0),
        line(250, server, request_id=name, event="first_token"),
        line(499, worker, request_id=name, event="finished", finish="stop"),
        line(499, server, request_id=name, event="finished", outcome="stop"),
    ]


ORDER = [
    ("router", "arrived"),
    ("router", "tokenised"),
    ("router", "decided"),
    ("router", "sent"),
    ("engine", "received"),
    ("worker", "admitted"),
    ("worker", "first_chunk"),
    ("engine", "first_token"),
    ("router", "first_token"),
    ("worker", "finished"),
    ("engine", "finished"),
    ("router", "finished"),
]


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "ullage-run"
    folder.mkdir()
    (folder / "chat-router-0.log").write_text("\n".join(routers("mine")))
    (folder / "chat-single-0.log").write_text("\n".join(engines("mine")))
    return folder


def test_files_are_joined_in_the_order_of_what_happened(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "mine", "--logs", str(logs), "-o", "json"]) == 0
    steps = told(capsys)
    assert [(step["process"], step["event"]) for step in steps] == ORDER
    assert steps[2]["admission_action"] == "accept"
    assert steps[4]["pod"] == "chat-single-0"
    # Its line says 2 ms, as lines do.
    assert steps[4]["time"] == steps[3]["time"] == "2026-09-21T14:13:20.002400Z"
    assert steps[-1]["status"] == 200


def test_a_router_decides_again_after_the_queue_also_within_a_millisecond(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = [
        {"event": "decided", "after_s": 0.001, "admission_action": "queue"},
        {"event": "queued", "after_s": 2.0001, "seconds": 1.999},
        {"event": "decided", "after_s": 2.0002, "admission_action": "reject"},
    ]
    whole = {"arrived": ARRIVED, "timeline": timeline, "duration_s": 2.0003, "status": 429}
    text = line(2000, "ullage_router.server", request_id="mine", event="refused", **whole)
    (tmp_path / "chat-router-0.log").write_text(text)
    assert main(["trace", "mine", "--logs", str(tmp_path), "-o", "json"]) == 0
    events = [step["event"] for step in told(capsys)]
    assert events == ["arrived", "decided", "queued", "decided", "refused"]


def test_the_lines_of_a_rotated_log_are_read(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "mine", "--logs", str(logs), "-o", "json"]) == 0
    whole = told(capsys)

    path = logs / "chat-router-0.log"
    lines = path.read_text().splitlines(keepends=True)
    assert any("timeline" in each for each in lines[:4])
    (logs / "chat-router-0.log.1").write_text("".join(lines[:4]))
    path.write_text("".join(lines[4:]))
    assert main(["trace", "mine", "--logs", str(logs), "-o", "json"]) == 0
    assert told(capsys) == whole


def test_people_read_when_and_where(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "mine", "--logs", str(logs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "request mine, 2026-09-21T14:13:20.000+00:00"
    assert lines[0].split() == ["+0.0", "ms", "router", "chat-router-0", "arrived"]
    assert lines[6].split()[:5] == ["+10.0", "ms", "worker", "chat-single-0", "first_chunk"]
    assert "status=200" in lines[-1]


def test_the_folder_of_a_running_service_is_found(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(logs.parent))
    assert main(["trace", "mine"]) == 2
    assert "no ullage up runs here; pass the folder" in capsys.readouterr().err
    (logs / "state.json").write_text("{}")
    assert main(["trace", "mine", "-o", "json"]) == 0
    assert len(told(capsys)) == len(ORDER)


def test_what_a_killed_router_said_is_told(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = logs / "chat-router-0.log"
    kept = [text for text in path.read_text().splitlines() if "timeline" not in text]
    path.write_text("\n".join(kept))
    assert main(["trace", "mine", "--logs", str(logs), "-o", "json"]) == 0
    [decided] = [step for step in told(capsys) if step["process"] == "router"]
    assert (decided["event"], decided["reason"]) == ("decided", "FITS")


def test_errors_say_where_was_looked_and_what_to_do(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        (["trace", "other", "--logs", str(logs)], "request 'other' is not in 2 logs in"),
        (["trace", "mine", "--logs", str(tmp_path)], "has no *.log"),
        (["trace", "mine", "--logs", "/nowhere"], "is not a folder"),
        (["trace", "mine", "--logs", "x", "-n", "y"], "give only one of them"),
    ]
    for arguments, words in wrong:
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


KUBECTL = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
    *"get pods"*) cat {folder}/pods.json ;;
    *"logs chat-single-0"*--previous*) echo "previous terminated container not found" >&2; exit 1 ;;
    *"logs chat-single-0"*) cat {folder}/chat-single-0.log ;;
    *"logs chat-router-0"*) cat {folder}/chat-router-0.log ;;
    *) echo "error: forbidden" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def kubectl(logs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Puts a kubectl on the path that knows two pods; returns how it was called."""
    pods = [
        {"metadata": {"name": "chat-router-0"}},
        {
            "metadata": {"name": "chat-single-0"},
            "status": {"containerStatuses": [{"restartCount": 1}]},
        },
    ]
    (logs / "pods.json").write_text(json.dumps({"items": pods}))
    path = logs / "kubectl"
    path.write_text(KUBECTL.format(folder=logs))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{logs}:{os.environ['PATH']}")
    return lambda: (logs / "calls").read_text().splitlines()


def test_pods_are_read_with_kubectl(
    kubectl: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["trace", "mine", "-n", "prod", "--service", "chat", "--since", "5m"]
    assert main([*arguments, "-o", "json"]) == 0
    assert [(step["process"], step["event"]) for step in told(capsys)] == ORDER
    listed, *read = kubectl()
    assert "app.kubernetes.io/part-of=ullage,app.kubernetes.io/instance=chat" in listed
    assert all(call.startswith("--namespace prod") and "--since=5m" in call for call in read)
    assert sum("--previous" in call for call in read) == 1


def test_a_pod_without_a_log_is_left_out(
    kubectl: Callable[[], list[str]], logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = json.loads((logs / "pods.json").read_text())
    pods["items"].append({"metadata": {"name": "starting"}})
    (logs / "pods.json").write_text(json.dumps(pods))
    assert main(["trace", "mine", "-n", "prod", "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == len(ORDER)
    assert "left out: kubectl" in captured.err


def test_kubectls_own_errors_are_shown(
    kubectl: Callable[[], list[str]], logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs / "pods.json").write_text('{"items": []}')
    assert main(["trace", "mine", "-n", "prod"]) == 2
    assert "no pods with labels" in capsys.readouterr().err
    (logs / "pods.json").write_text('{"items": [{"metadata": {"name": "strange"}}]}')
    assert main(["trace", "mine", "-n", "prod"]) == 2
    assert "error: forbidden" in capsys.readouterr().err
