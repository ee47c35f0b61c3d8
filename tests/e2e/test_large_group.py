"""A prompt of thousands of tokens is answered by four ranks, and its trace has each chunk."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from ullage_testing.otlp import OtlpReceiver, ReceivedSpan
from ullage_testing.small_models import make_served_llama

if TYPE_CHECKING:
    Service = Any

CONTEXT = 8192
MODEL = "small"
NUM_TOKENS = 5000
CHUNK_TOKENS = 1024
TRACE = "4bf92f3577b34da6a3ce929d0e0e4738"
PARENT_SPAN = "00f067aa0ba902b7"
RANK = "ullage_engine.worker.rank_process"
ROUTER = "ullage-router"
ENGINE = "ullage-engine"
PARENTS = {
    f"text_completion {MODEL}": "",
    "decide": f"text_completion {MODEL}",
    "engine": f"text_completion {MODEL}",
    "generate": "engine",
    "queue": "generate",
    "prefill": "generate",
    "decode": "generate",
}
"""Spans of the request, and the span around each."""


@pytest.fixture(scope="module")
def service(
    start_service: Callable[[Path], "Service"],
    tmp_path_factory: pytest.TempPathFactory,
    collector: OtlpReceiver,
) -> "Service":
    """A pool of one rank, and one whose engine is a group of two by two ranks."""
    source = make_served_llama(tmp_path_factory.mktemp("model"), CONTEXT)
    document = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": MODEL},
        "spec": {
            "model": {
                "source": f"file://{source}",
                "name": MODEL,
                "maxModelLen": CONTEXT,
                "dtype": "Float32",
            },
            "device": "CPU",
            "router": {"replicas": 1},
            "pools": {
                "single": {"gpus": 1, "memory": {"maxKV": "8Mi"}},
                "large": {
                    "role": "Large",
                    "gpus": 4,
                    "parallelism": {"tensor": 2, "pipeline": 2},
                    "memory": {"maxKV": "8Mi"},
                },
            },
            "routing": {"largeRequestTokens": 2000},
            "batching": {"prefillChunkTokens": CHUNK_TOKENS},
            "memory": {"deviceBytes": "1500Mi", "safetyReserve": "32Mi"},
            "slo": {"ttftP95": "300s", "e2eP95": "600s"},
            "observability": {"tracing": {"endpoint": collector.grpc_endpoint, "samplePercent": 0}},
        },
    }
    path = tmp_path_factory.mktemp("manifest") / "small.yaml"
    path.write_text(yaml.safe_dump(document))
    return start_service(path)


def ask(service: "Service", num_tokens: int, **headers: str) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": [100 + number % 400 for number in range(num_tokens)],
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
    }
    answer = httpx.post(
        f"{service.http_url}/v1/completions",
        json=body,
        headers=headers,
        timeout=300,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    return answer


def test_four_ranks_answer_a_prompt_of_thousands_of_tokens(
    service: "Service", collector: OtlpReceiver
) -> None:
    assert sum(RANK in each.cmdline() for each in service.family()) == 3  # and their leader
    assert ask(service, 100).headers["x-ullage-route"] == "single"

    parent = f"00-{TRACE}-{PARENT_SPAN}-01"
    answer = ask(service, NUM_TOKENS, traceparent=parent, **{"x-request-id": "thousands"})
    engine = answer.headers["x-ullage-engine"]
    assert answer.headers["x-ullage-route"] == "tp2pp2"

    def has_all(spans: list[ReceivedSpan]) -> bool:
        return PARENTS.keys() <= {span.name for span in spans if span.trace_id == TRACE}

    own = {span.name: span for span in collector.wait(has_all) if span.trace_id == TRACE}
    for name, around in PARENTS.items():
        expected = own[around].span_id if around else PARENT_SPAN
        assert own[name].parent_id == expected, name
        assert own[name].start_s <= own[name].end_s

    root = own[f"text_completion {MODEL}"]
    assert root.service == ROUTER
    assert root.attributes["admission_action"] == "route4"
    assert root.attributes["route"] == "tp2pp2"
    assert root.attributes["ullage.pool"] == "large"
    assert root.attributes["ullage.engine"] == engine
    for name in ("generate", "queue", "prefill", "decode"):
        assert (own[name].service, own[name].instance) == (ENGINE, engine)
    assert own["generate"].attributes["gen_ai.usage.input_tokens"] == NUM_TOKENS

    chunks = [fields["tokens"] for name, fields in own["prefill"].events if name == "chunk"]
    assert sum(chunks) == NUM_TOKENS
    assert len(chunks) >= NUM_TOKENS // CHUNK_TOKENS
    assert max(chunks) <= CHUNK_TOKENS

    stats = httpx.get(f"{service.http_url}/stats", trust_env=False).json()
    [record] = [each for each in stats["latest"] if each["request_id"] == "thousands"]
    assert (record["trace_id"], record["route"]) == (TRACE, "tp2pp2")
