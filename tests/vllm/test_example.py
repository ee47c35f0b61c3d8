"""examples/vllm.yaml, unchanged, by `ullage up`: the router answers with what vLLM computed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What `ullage up` writes about a service that is ready."""
    file = tmp_path / "state.json"
    log = tmp_path / "log"
    command = [str(Path(sys.executable).with_name("ullage")), "up"]
    command += ["--file", "examples/vllm.yaml", "--http-port", "0", "--grpc-port", "0"]
    command += ["--state-file", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield json.loads(file.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_example_answers_by_vllm(state: dict[str, Any]) -> None:
    workers = psutil.Process(state["engines"][0]["pid"]).children()
    assert any("ullage_engine.vllm_worker" in worker.cmdline() for worker in workers)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2-135m", "messages": messages, "temperature": 0}
    url = f"{state['http_url']}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=PATIENCE_S).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
