"""A service without an engine: the first request wakes one, and it sleeps again when idle."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def sleepy(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    manifest = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8"))
    scaling = {"minReplicas": 0, "maxReplicas": 1, "idleAfter": "2s"}
    spec = manifest["spec"]
    spec["pools"] = {"single": spec["pools"]["single"] | {"replicas": 0, "autoscaling": scaling}}
    spec["model"]["maxModelLen"] = 1024
    spec["routing"]["largeRequestTokens"] = 1024
    path = tmp_path_factory.mktemp("asleep") / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return start_service(path)


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.1)


def engines(service: Any) -> int:
    """Engine processes that run."""
    return sum("ullage_engine.main" in command_of(process) for process in service.family())


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def test_requests_wake_the_service_and_it_sleeps_again(sleepy: Any) -> None:
    assert sleepy.state["engines"] == []
    assert engines(sleepy) == 0
    with httpx.Client(base_url=sleepy.http_url, timeout=DEADLINE_S, trust_env=False) as client:
        assert client.get("/readyz").status_code == 200
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Name a colour."}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answers = []
        for _ in range(2):  # the second time its tokenizer and profile are known already
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["message"]["content"])
            latest = client.get("/stats").json()["latest"][0]
            assert latest["held_s"] > 0
            until(lambda: engines(sleepy) == 0, "the engine is stopped")
        assert answers[0] == answers[1] != ""
