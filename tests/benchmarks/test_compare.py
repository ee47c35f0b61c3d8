"""What the comparison of servers judges, and that it leaves no process behind."""

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            return
        delta = [{"role": "assistant", "content": ""}, *[{"content": "a"}] * body["max_tokens"]]
        usage = {"prompt_tokens": 180, "completion_tokens": body["max_tokens"]}
        for chunk in [{"choices": [{"delta": each}]} for each in delta] + [{"usage": usage}]:
            self.wfile.write(b"data: %s\\n\\n" % json.dumps(chunk).encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def compare() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("compare")


def figures(speed: float, ttft: float) -> dict[str, float]:
    return {"output_tokens_per_s": speed, "ttft_p50_ms": ttft}


def test_ullage_is_compared_with_the_better_of_the_others(compare: Any) -> None:
    servers = {
        "ullage": {1: figures(150, 60), 8: figures(300, 61), 32: figures(299, 60)},
        "llama.cpp": {1: figures(100, 300), 8: figures(90, 300), 32: figures(90, 300)},
        "vllm": {1: figures(50, 100), 8: figures(200, 100), 32: figures(200, 100)},
    }
    first, second, third = compare.ratios(servers)
    assert (first.throughput, first.throughput_peer) == (1.5, "llama.cpp")
    assert (first.ttft, first.ttft_peer) == (0.6, "vllm")
    assert first.is_reached
    assert not second.is_reached  # its first tokens are late
    assert not third.is_reached  # its throughput is low
    assert str(third) == "c=32: tok/s x1.50 (vllm), TTFT p50 x0.60 (vllm): MISSED"


def test_nothing_is_judged_without_both_sides(compare: Any) -> None:
    ours, theirs = {1: figures(9, 1)}, {1: figures(1, 9)}
    assert compare.ratios({"ullage": ours}) == []
    assert compare.ratios({"vllm": theirs, "llama.cpp": theirs}) == []


def test_a_server_is_measured_and_ended_with_its_children(compare: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def command(port: int) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(port)]

    server = compare.Server("vllm", "1", "a stand-in", command)
    result = compare.measure(server, [1, 8], log)
    assert not [pid for pid in map(int, log.read_text().split()) if psutil.pid_exists(pid)]
    assert result.pss_mb > 0
    means = compare.means([result, result])
    assert means == result.levels
    assert [each["requests"] for each in means.values()] == [32, 32]
    assert means[8]["prompt_tokens"] == 180
    assert 0 < means[8]["ttft_p50_ms"] <= means[8]["e2e_p95_ms"]

    plot = tmp_path / "plot.svg"
    compare.plot(plot, {"vllm": {"means": means}})
    assert len(list(ET.parse(plot).iter("{http://www.w3.org/2000/svg}rect"))) == 4


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(
    compare: Any, tmp_path: Path
) -> None:
    server = compare.Server("vllm", "1", "", lambda port: ["sh", "-c", "echo no room; exit 3"])
    with pytest.raises(SystemExit, match="vllm ended with status 3:\nno room"):
        compare.measure(server, [1], tmp_path / "log")
