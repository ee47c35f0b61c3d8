"""A large request on a real group of four ranks, one of which dies in the middle of the answer."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml
from ullage_testing.otlp import OtlpReceiver

if TYPE_CHECKING:
    Service = Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. " * 16
RANK = "ullage_engine.worker.rank_process"
RESTART_S = 60.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4737"
SPANS = {"chat smollm2-135m", "decide", "engine", "generate", "queue", "prefill", "decode"}


@pytest.fixture(scope="module")
def hybrid(
    start_service: Callable[[Path], "Service"],
    tmp_path_factory: pytest.TempPathFactory,
    collector: OtlpReceiver,
) -> "Service":
    """examples/hybrid.yaml in float32, so that texts can be compared."""
    document = yaml.safe_load((ROOT / "examples" / "hybrid.yaml").read_text())
    document["spec"]["model"] |= {"dtype": "Float32", "maxModelLen": 2048}
    document["spec"]["routing"]["largeRequestTokens"] = 200
    document["spec"]["limits"]["requestTimeout"] = "300s"  # of a machine with other work
    document["spec"]["slo"] = {"ttftP95": "300s", "e2eP95": "600s"}
    tracing = {"endpoint": collector.grpc_endpoint, "samplePercent": 0}
    document["spec"]["observability"] = {"tracing": tracing}
    path = tmp_path_factory.mktemp("hybrid") / "hybrid.yaml"
    path.write_text(yaml.safe_dump(document))
    return start_service(path)


def stream(
    service: "Service", prompt: str, on_text: Callable[[str], None] = lambda _: None
) -> tuple[httpx.Headers, str]:
    """The headers and the whole text of one greedy answer, which must end without an error."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    reason = None
    client = httpx.Client(base_url=service.http_url, timeout=300, trust_env=False)
    with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            on_text(text)
    assert reason == "length"
    return response.headers, text


def ranks_of(service: "Service") -> set[psutil.Process]:
    """The ranks of the large pool's engine besides the one that leads them."""
    ranks = set()
    for process in service.family():
        with contextlib.suppress(psutil.Error):  # of one that ends meanwhile
            if RANK in process.cmdline():
                ranks.add(process)
    return ranks


def test_a_trace_names_the_route_of_the_group_and_its_engine(
    hybrid: "Service", collector: OtlpReceiver
) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
    }
    answer = httpx.post(
        f"{hybrid.http_url}/v1/chat/completions",
        json=body,
        headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
        timeout=300,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    engine = answer.headers["x-ullage-engine"]

    spans = collector.wait(
        lambda spans: {span.name for span in spans if span.trace_id == TRACE} >= SPANS
    )
    own = {span.name: span for span in spans if span.trace_id == TRACE}
    root = own["chat smollm2-135m"].attributes
    assert (root["route"], root["ullage.pool"], root["ullage.engine"]) == (
        "tp2pp2",
        "large",
        engine,
    )
    for name in ("generate", "queue", "prefill", "decode"):
        assert (own[name].service, own[name].instance) == ("ullage-engine", engine)
    assert sum(name == "chunk" for name, _ in own["prefill"].events) >= 1

    stats = httpx.get(f"{hybrid.http_url}/stats", trust_env=False).json()
    assert TRACE in {record["trace_id"] for record in stats["latest"]}


def test_a_large_answer_survives_the_death_of_one_of_four_ranks(hybrid: "Service") -> None:
    before = ranks_of(hybrid)
    assert len(before) == 3
    small, _ = stream(hybrid, "Say hello.")
    headers, expected = stream(hybrid, PROMPT)
    assert (small["x-ullage-route"], headers["x-ullage-route"]) == ("single", "tp2pp2")
    assert headers["x-ullage-action"] == "route4"
    killed_at: list[int] = []

    def kill_a_rank(text: str) -> None:
        if text and not killed_at:
            max(before, key=lambda rank: rank.pid).kill()
            killed_at.append(len(text))

    headers, text = stream(hybrid, PROMPT, kill_a_rank)
    assert headers["x-ullage-route"] == "tp2pp2"
    assert text == expected
    assert 0 < killed_at[0] < len(text)
    deadline = time.monotonic() + RESTART_S
    while len(ranks_of(hybrid) - before) < 3:
        assert time.monotonic() < deadline, "the group has not been started anew"
        time.sleep(0.1)
