"""The survival table: what bystanders are said to have seen."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.compare.servers import MANIFEST, Server
from benchmarks.survive import adapter, benchmark, cases, play
from benchmarks.survive.container import Container, container, neighbour
from benchmarks.survive.outcome import Outcome, summary
from benchmarks.survive.servers import POOL_BYTES, two_engines, ullage
from safetensors.torch import load_file

from ullage_verify import memory_limit
from ullage_verify.client import ChatAnswer
from ullage_verify.processes import ServerProcesses

SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how, port = sys.argv[1:]
streams = 0
held = b"1" * (80 << 20)  # more than anything else in the group
if how == "leaks":
    with open(f"/dev/shm/psm_{os.getpid()}", "wb") as file:
        file.write(held)
if how == "fails":
    sys.exit("no memory is left")

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
    monkeypatch.setattr(play, "PATIENCE_S", 3.0)


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
    [outcome] = play.outcomes_of(stand_in(tmp_path, how), [case], play.Sitting(tmp_path))
    for part, cell in zip(cells, outcome.cells[2:], strict=True):
        assert cell.startswith(part), outcome


@needs_groups
@pytest.mark.parametrize(
    ("how", "kills", "seen"),
    [
        ("serves", 2, "back 2 of 2 times, /dev/shm has 0 files as before"),
        ("leaks", 2, "back 2 of 2 times, /dev/shm grew by 3 files (240 MiB)"),
    ],
)
def test_a_crash_loop_counts_what_stays_in_shared_memory(
    tmp_path: Path,
    impatience: None,
    how: str,
    kills: int,
    seen: str,
) -> None:
    sitting = play.Sitting(tmp_path, num_kills=kills)
    outcome = play.crash_loop(stand_in(tmp_path, how), sitting)
    assert (outcome.word, outcome.failure) == (seen, "")


@needs_groups
def test_a_full_shared_memory_is_a_crash_loop(
    tmp_path: Path, impatience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.survive.container.SHARED_MEMORY_BYTES", 200 << 20)
    outcome = play.crash_loop(stand_in(tmp_path, "leaks"), play.Sitting(tmp_path))
    assert "No space left on device" in outcome.failure
    assert outcome.word == (
        "does not start after 2 kills, back 1 of 10 times, /dev/shm grew by 3 files (200 MiB)"
    )
    assert outcome.fault == outcome.failure


@needs_groups
def test_a_crash_loop_needs_a_first_start(tmp_path: Path) -> None:
    outcome = play.crash_loop(stand_in(tmp_path, "fails"), play.Sitting(tmp_path))
    assert outcome.failure == "does not start after 0 kills: no memory is left"


@needs_groups
def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    [outcome] = play.outcomes_of(stand_in(tmp_path, "fails"), ["too-long"], play.Sitting(tmp_path))
    assert outcome.failure == "does not start: no memory is left"
    assert (outcome.word, outcome.fault) == ("does not start", outcome.failure)


@pytest.fixture
def box() -> Iterator[Container]:
    with container(f"{play.GROUP}-test") as box:
        yield box


@needs_groups
def test_a_container_sees_its_own_limit_and_its_own_shared_memory(box: Container) -> None:
    box.group.limit(512 << 20)
    code = (
        "from pathlib import Path; from ullage_common.process.memory import container_limit;"
        "Path('/dev/shm/left').write_bytes(bytes(1 << 20)); print(container_limit())"
    )
    seen = subprocess.check_output(box.inside([sys.executable, "-c", code]), text=True)
    assert int(seen) == 512 << 20
    assert (box.shared_files().count, box.shared_files().num_bytes) == (1, 1 << 20)
    assert not Path("/dev/shm/left").exists()


@needs_groups
def test_a_neighbour_takes_and_frees_memory(box: Container) -> None:
    with neighbour(box.group, 64 << 20, 0.05):
        assert until_used(box, lambda used: used > 64 << 20)
        assert until_used(box, lambda used: used < 48 << 20)
    assert until_used(box, lambda used: used < 8 << 20)


def until_used(box: Container, is_enough: object) -> bool:
    """Wait until the group's bytes are as wanted."""
    assert callable(is_enough)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if is_enough(box.group.used_bytes()):
            return True
        time.sleep(0.005)
    return False


GATEWAY = """
import subprocess, sys, time
worker = "import sys, time; until = time.monotonic() + float(sys.argv[1])\\n"
worker += "while time.monotonic() < until: pass\\ntime.sleep(60)"
for seconds in ("0", "0.5"):
    subprocess.Popen([sys.executable, "-c", worker, seconds, "llama-server"])
print("started", flush=True)
time.sleep(60)
"""


def test_the_busiest_worker_behind_a_gateway_is_found() -> None:
    command = [sys.executable, "-c", GATEWAY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stdout
            gateway.stdout.readline()
            processes = ServerProcesses(gateway.pid)
            until = time.monotonic() + 30
            while True:
                [pid] = cases.busiest_worker(processes)
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[-3] == "0.5":
                    break
                assert time.monotonic() < until
        finally:
            for pid in processes.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_server_without_workers_cannot_lose_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(cases.NotPlayedError):
                cases.busiest_worker(ServerProcesses(process.pid))
        finally:
            process.kill()


def test_health_counts_only_while_a_broken_stream_waits() -> None:
    health = play.Health([1.0, 11.0, 14.0, 30.0])
    whole = ChatAnswer(0.0, status=200, finish_reason="stop", last_at=5.0, ended_at=40.0)
    broken = replace(whole, error="silent for 10 s", last_at=10.0, ended_at=20.0)
    assert health.silent_s([whole]) == 0
    assert health.silent_s([whole, broken]) == 4


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome("s", "kill", whole=3, back_s=1.0), "goes on"),
        (Outcome("s", "kill", whole=3, back_s=1.0, longest_pause_s=17.7), "goes on after 18 s"),
        (
            Outcome("s", "kill", whole=1, broken=2, back_s=1.0, errors=["broken"]),
            "2 of 3 break off",
        ),
        (Outcome("s", "kill", whole=2, broken=1, back_s=1.0), "1 of 3 breaks off"),
        (Outcome("s", "kill", broken=3, errors=["broken off"]), "all break off, server gone"),
        (
            Outcome("s", "kill", broken=3, longest_pause_s=150.2, errors=["silent for 150 s"]),
            "no word for 150 s, server gone",
        ),
        (Outcome("s", "kill", whole=3, other_words=2, back_s=1.0), "goes on with other words"),
        (Outcome("s", "kill", whole=3, other_words=0), "goes on, server gone"),
        (Outcome("s", "kill", skipped="no adapters"), "not played"),
    ],
)
def test_a_word_for_what_the_streams_of_others_saw(outcome: Outcome, word: str) -> None:
    assert outcome.word == word


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (Outcome("s", "kill", whole=3, other_words=0, back_s=1.0), ""),
        (Outcome("s", "kill", whole=3, back_s=1.0), ""),
        (Outcome("s", "kill", skipped="no adapters"), ""),
        (Outcome("s", "crash-loop", restarts="back 10 of 10 times"), ""),
        (Outcome("s", "crash-loop", restarts="x", failure="does not start"), "does not start"),
        (Outcome("s", "kill", whole=2, broken=1, back_s=1.0), "1 of 3 streams broke off"),
        (
            Outcome("s", "kill", whole=3, other_words=1, back_s=1.0),
            "1 of 3 answers have other words",
        ),
        (Outcome("s", "kill", whole=3, other_words=0), "the server never answered again"),
    ],
)
def test_a_fault_names_the_broken_promise(outcome: Outcome, fault: str) -> None:
    assert outcome.fault == fault


@needs_groups
@pytest.mark.parametrize(
    ("how", "case", "status", "fault"),
    [
        ("serves", "too-long", 0, ""),
        ("changes", "too-long", 1, "ullage, too-long: 3 of 3 answers have other words\n"),
        ("serves", "kill", 1, "ullage, kill: 3 of 3 streams broke off\n"),
    ],
)
def test_the_exit_status_tells_whether_ullage_is_well(
    tmp_path: Path,
    impatience: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    case: str,
    status: int,
    fault: str,
) -> None:
    server = stand_in(tmp_path, how)
    monkeypatch.setattr(benchmark, "SERVERS", {"ullage": lambda *_: server})
    monkeypatch.setattr(benchmark.signal, "signal", lambda *_: None)
    assert benchmark.main([str(tmp_path), "--cases", case]) == status
    assert capsys.readouterr().err == fault


def test_the_summary_has_a_column_for_each_server() -> None:
    seen = [
        Outcome("vllm", "logprobs", broken=3),
        Outcome("ullage", "logprobs", whole=3, back_s=0.1),
        Outcome("ullage", "kill", whole=3, back_s=0.1),
    ]
    lines = summary(seen).splitlines()
    assert lines[0] == "| what happens | report | case | vllm | ullage |"
    assert lines[2] == (
        "| log-probabilities of a long prompt | vllm#14239 | `logprobs` "
        "| all break off, server gone | goes on |"
    )
    assert lines[3].endswith("| `kill` |  | goes on |")


def test_each_setting_changes_what_it_names(tmp_path: Path) -> None:
    def spec_of(server: Server | None) -> Any:
        assert server
        words = server.command(0)
        return yaml.safe_load(Path(words[words.index("-f") + 1]).read_text())["spec"]

    base = spec_of(ullage(tmp_path, "ordinary"))
    assert base == yaml.safe_load(MANIFEST.read_text())["spec"]
    small = spec_of(ullage(tmp_path, "small pool"))
    assert small["pools"]["single"] == {"gpus": 1, "memory": {"maxKV": POOL_BYTES}}
    memory = spec_of(ullage(tmp_path, "no sizes"))["memory"]
    assert set(memory) == {"safetyReserve", "tiers"}
    assert spec_of(ullage(tmp_path, "two ranks"))["pools"]["single"]["gpus"] == 2
    assert spec_of(two_engines(tmp_path))["pools"]["single"]["replicas"] == 2
    assert ullage(tmp_path, "adapter") is None


def test_an_adapter_fits_the_checkpoint(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = adapter.write_adapter(tmp_path, tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == adapter.RANK
    tensors = load_file(folder / "adapter_model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert len(shapes) == 8
    assert shapes["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] == (4, 8)
    assert shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] == (8, 8)


@needs_groups
def test_a_quick_sitting_compares_no_words(tmp_path: Path, impatience: None) -> None:
    quick = play.Sitting(tmp_path, is_quick=True)
    [outcome] = play.outcomes_of(stand_in(tmp_path, "serves"), ["too-long"], quick)
    assert (outcome.whole, outcome.other_words, outcome.word) == (3, None, "goes on")


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert benchmark.main([str(tmp_path), "--only", "ulage"]) == 2
    assert "--only 'ulage' is none of llama.cpp, vllm" in capsys.readouterr().err


RUN = """
import sys
from benchmarks.compare.servers import Server
from benchmarks.survive import benchmark, play

command = [sys.executable, sys.argv[1], "serves"]
server = Server("stand-in", "1", "", lambda port: [*command, str(port)])
benchmark.SERVERS = {"stand-in": lambda *_: server}
print(play.GROUP, flush=True)
sys.exit(benchmark.main([sys.argv[2], "--cases", "crowd"]))
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
    assert process.returncode == benchmark.TERMINATED
    assert not folder.exists()
