"""`ullage-engine fetch` against a hub of this machine: what it fetches, verifies and reports."""

import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ullage_testing.hub import COMMIT, Hub
from ullage_testing.ports import free_port

WEIGHTS = bytes(range(256)) * 40_000
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "x.bin": b"no"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub(dict(FILES))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.may_send.set()
    server.shutdown()
    thread.join()
    server.server_close()


def start(hub: Hub, home: Path, *more: str, source: str = "hf://org/name") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ullage_engine.main", "fetch", "--source", source, *more]
    env = os.environ | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, object], str]:
    """Return the exit status, the last line of the output and the errors."""
    out, err = process.communicate(timeout=120)
    return process.returncode, json.loads(out.splitlines()[-1]), err


TOTAL = len(WEIGHTS) + len(FILES["config.json"])


def test_a_model_is_fetched_once_and_the_report_says_so(hub: Hub, tmp_path: Path) -> None:
    report = tmp_path / "report"
    status, last, _ = ended(start(hub, tmp_path, "--report", str(report)))
    expected = {"state": "fetched", "bytes": TOTAL, "total_bytes": TOTAL}
    assert (status, last) == (0, expected | {"revision": COMMIT, "error": ""})
    assert json.loads(report.read_text()) == last
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"]
    snapshot = tmp_path / "hub/models--org--name/snapshots" / COMMIT
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS

    assert ended(start(hub, tmp_path))[:2] == (0, last)
    assert len(hub.fetched) == 2


def progress(port: int) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/progress")
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def test_the_port_says_how_far_the_download_is(hub: Hub, tmp_path: Path) -> None:
    hub.may_send.clear()
    port = free_port()
    process = start(hub, tmp_path, "--port", str(port), "--host", "127.0.0.1")
    assert hub.has_sent_half.wait(60)
    now = progress(port)
    assert (now["state"], now["total_bytes"]) == ("fetching", TOTAL)
    assert 0 <= int(str(now["bytes"])) < TOTAL

    hub.may_send.set()
    status, last, _ = ended(process)
    assert (status, last["bytes"]) == (0, TOTAL)


def test_a_damaged_file_is_removed_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    assert ended(start(hub, tmp_path))[0] == 0
    blobs = tmp_path / "hub/models--org--name/blobs"
    damaged = blobs / hashlib.sha256(WEIGHTS).hexdigest()
    damaged.write_bytes(b"\x01" + WEIGHTS[1:])

    status, last, errors = ended(start(hub, tmp_path))
    assert (status, last["state"]) == (1, "failed")
    assert "its SHA-256 is" in str(last["error"])
    assert "was removed" in errors
    assert not damaged.exists()
    assert ended(start(hub, tmp_path))[0] == 0
    assert damaged.read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://org/other", ["hf://org/other", "check the name"]),
        ("hf://name", ["write hf://org/name"]),
        ("file:///x", ["only models of the hub"]),
    ],
)
def test_a_source_that_no_try_fetches_has_its_own_status(
    hub: Hub, tmp_path: Path, source: str, words: list[str]
) -> None:
    status, last, _ = ended(start(hub, tmp_path, source=source))
    assert status == 2
    assert all(word in str(last["error"]) for word in words), last


def test_a_repository_without_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    status, last, _ = ended(start(hub, tmp_path))
    assert (status, hub.fetched) == (2, [])
    assert "no *.safetensors" in str(last["error"])


def test_a_hub_that_does_not_answer_may_be_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.shutdown()
    hub.server_close()
    status, last, _ = ended(start(hub, tmp_path))
    assert (status, last["state"]) == (1, "failed")
    assert "check the name, the revision" in str(last["error"])
