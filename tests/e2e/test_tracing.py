"""One request of a running service is one trace, and one story in the logs of its processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from ullage_testing.otlp import OtlpReceiver

    Service = Any

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
NAMES = {
    *("tokenise", "decide", "engine", "generate", "queue", "prefill", "decode"),
    "chat smollm2-135m",
}
EVENTS = ("received", "admitted", "first_chunk", "first_token", "finished")
"""Events of log lines. An acceptance at once has no line: it is in the timeline of the last."""


LARGE = "7" + TRACE[1:]
LARGE_PROMPT = "The harbour keeps a ledger of every ship, its cargo and its debts. " * 150


def test_a_large_request_is_a_trace_of_the_large_pool(
    service: "Service", collector: "OtlpReceiver"
) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": LARGE_PROMPT}],
        "max_tokens": 4,
    }
    answer = httpx.post(
        f"{service.http_url}/v1/chat/completions",
        json=body,
        headers={"traceparent": f"00-{LARGE}-00f067aa0ba902b7-01", "x-request-id": "harbour"},
        timeout=300,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    engine = answer.headers["x-ullage-engine"]
    assert answer.json()["usage"]["prompt_tokens"] > 2000

    spans = collector.wait(
        lambda spans: {span.name for span in spans if span.trace_id == LARGE} >= NAMES
    )
    own = {span.name: span for span in spans if span.trace_id == LARGE}
    root = own["chat smollm2-135m"]
    assert (root.attributes["admission_action"], root.attributes["route"]) == ("route4", "large")
    for span in (root, own["engine"]):
        assert (span.attributes["ullage.pool"], span.attributes["ullage.engine"]) == (
            "large",
            engine,
        )

    assert own["engine"].parent_id == root.span_id
    assert own["generate"].parent_id == own["engine"].span_id
    for name in ("queue", "prefill", "decode"):
        span = own[name]
        assert (span.service, span.instance, span.parent_id) == (
            "ullage-engine",
            engine,
            own["generate"].span_id,
        )
    chunks = [fields["tokens"] for name, fields in own["prefill"].events if name == "chunk"]
    assert len(chunks) > 1
    assert sum(chunks) <= own["generate"].attributes["gen_ai.usage.input_tokens"]

    stats = httpx.get(f"{service.http_url}/stats", trust_env=False).json()
    [record] = [each for each in stats["latest"] if each["request_id"] == "harbour"]
    assert (record["trace_id"], record["route"]) == (LARGE, "large")


def test_a_request_is_one_trace_through_all_processes(
    service: "Service", collector: "OtlpReceiver"
) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 8,
    }
    answer = httpx.post(
        f"{service.http_url}/v1/chat/completions",
        json=body,
        headers={"traceparent": PARENT, "x-request-id": "rivers"},
        timeout=120,
        trust_env=False,
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "rivers"
    spans = collector.wait(
        lambda spans: {span.name for span in spans if span.trace_id == TRACE} >= NAMES
    )
    own = {span.name: span for span in spans if span.trace_id == TRACE}
    by_id = {span.span_id: span for span in own.values()}
    root = own["chat smollm2-135m"]
    assert (root.service, root.parent_id) == ("ullage-router", "00f067aa0ba902b7")
    assert root.attributes["admission_action"] == "accept"
    assert root.attributes["route"] == "single"
    assert root.attributes["pred_kv_mb"] > 0
    assert root.attributes["needed_bytes"] <= root.attributes["available_bytes"]
    assert by_id[own["engine"].parent_id] is root
    assert by_id[own["generate"].parent_id] is own["engine"]
    for name in ("queue", "prefill", "decode"):
        assert by_id[own[name].parent_id] is own["generate"]
        assert own[name].service == "ullage-engine"
    assert "river" not in str([span.attributes for span in own.values()]).replace("rivers", "")

    told = [
        json.loads(line)
        for path in Path(service.state["run_dir"]).rglob("*.log")
        for line in path.read_text().splitlines()
        if '"request_id":"rivers"' in line
    ]
    assert {line.get("event") for line in told} >= set(EVENTS)
    assert "Name three" not in str(told)

    command = [sys.executable, "-m", "ullage_cli.main", "trace", "rivers", "-o", "json"]
    command += ["--logs", service.state["run_dir"]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [steps[0]["event"], steps[-1]["event"]] == ["arrived", "finished"]
    assert "decided" in {step["event"] for step in steps}
    assert {step["process"] for step in steps} == {"router", "engine", "worker"}
    times = [step["time"][:23] for step in steps]  # milliseconds
    assert times == sorted(times)
