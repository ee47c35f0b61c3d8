"""The survival table: what bystanders are said to have seen."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.compare.servers import Server

from ullage_verify import memory_limit

survive = importlib.import_module("benchmarks.survive")

SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how, port = sys.argv[1:]
streams = 0
held = b"1" * (80 << 20)  # more than anything else in the group

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        page = {"data": [{"id": "smollm2", "max_model_len": 2000}]}
        self.send_response(200 if self.path in ("/v1/models", "/health") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = json.dumps(body)
        is_wrong = len(text) > 20_000 or "prompt_logprobs" in body or body.get("echo")
        self.send_response(400 if is_wrong else 200)
        self.end_headers()
        if is_wrong:
            return
        global streams
        count = min(30, body["max_tokens"])
        streams += count == 30
        word = "b" if how == "changes" and streams > 9 else "a"
        for number in range(count):
            delta = {"choices": [{"delta": {"content": word}}]}
            self.wfile.write(f"data: {json.dumps(delta)}\\n\\n".encode())
            time.sleep(0.03)
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": count}
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage}
        self.wfile.write(f"data: {json.dumps(end)}\\n\\ndata: [DONE]\\n\\n".encode())

    def log_message(self, *arguments):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

Server(("127.0.0.1", int(port)), Handler).serve_forever()
"""

needs_groups = pytest.mark.skipif(
    not any(
        (root / "cgroup.procs").exists() and root.stat().st_uid == 0 for root in memory_limit.ROOTS
    ),
    reason="control groups cannot be made here",
)


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survive, "PATIENCE_S", 3.0)


def stand_in(tmp_path: Path, how: str) -> Server:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return Server("stand-in", "1", "", lambda port: [sys.executable, str(file), how, str(port)])


@needs_groups
@pytest.mark.parametrize(
    ("how", "case", "cells"),
    [
        ("serves", "too-long", ["400", "3 whole with the same words, pause", "answers after"]),
        ("serves", "crowd", ["60 of 60: 200", "3 whole with the same", "answers after"]),
        ("serves", "logprobs", ["2 of 2: 400", "3 whole with the same", "answers after"]),
        ("changes", "too-long", ["400", "3 whole, 3 with other words", "answers after"]),
        ("serves", "kill", ["-", "0 whole, 3 broken", "dead, /health: not 200"]),
        ("serves", "oom", ["-", "0 whole, 3 broken", "dead, /health: not 200"]),
        ("serves", "hang", ["-", "0 whole, 3 broken", "dead, /health: not 200"]),
    ],
)
def test_a_case_tells_what_everybody_saw(
    tmp_path: Path, impatience: None, how: str, case: str, cells: list[str]
) -> None:
    [outcome] = survive.outcomes_of(stand_in(tmp_path, how), [case], tmp_path)
    for part, cell in zip(cells, outcome.cells[2:], strict=True):
        assert cell.startswith(part), outcome


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert survive.main([str(tmp_path), "--only", "ulage"]) == 2
    assert "--only 'ulage' is none of llama.cpp, vllm" in capsys.readouterr().err


RUN = """
import sys
from benchmarks import survive
from benchmarks.compare.servers import Server

command = [sys.executable, sys.argv[1], "serves"]
survive.SERVERS = {"stand-in": lambda _: Server("stand-in", "1", "", lambda p: [*command, str(p)])}
print(survive.GROUP, flush=True)
sys.exit(survive.main([sys.argv[2], "--cases", "crowd"]))
"""


@needs_groups
def test_the_end_of_the_program_ends_the_server_and_its_group(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    command = [sys.executable, "-c", RUN, str(file), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    name = process.stdout.readline().strip()
    [folder] = [each / name for each in memory_limit.ROOTS if (each / "cgroup.procs").exists()][:1]
    until = time.monotonic() + 60
    while not (folder.exists() and (folder / "cgroup.procs").read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)

    process.terminate()

    process.communicate(timeout=60)
    assert process.returncode == survive.TERMINATED
    assert not folder.exists()
