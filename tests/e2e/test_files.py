"""Files on the real model: documents by reference, and a batch whose router is killed."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest
import yaml
from ullage_testing.local_service import services

if TYPE_CHECKING:
    Service = Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
NOTES = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. " * 30
NUM_LINES = 24


@pytest.fixture(scope="module")
def files_service(
    tmp_path_factory: pytest.TempPathFactory, weights_dir: Path
) -> Iterator["Service"]:
    manifest = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    manifest["spec"]["router"] = {"replicas": 1, "files": {"batches": {"maxConcurrency": 2}}}
    del manifest["spec"]["pools"]["large"]
    path = tmp_path_factory.mktemp("files") / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with services(tmp_path_factory, weights_dir) as start:
        yield start(path)


@contextlib.contextmanager
def client_of(service: "Service") -> Iterator[openai.OpenAI]:
    with httpx.Client(timeout=120, trust_env=False, verify=False) as http:
        yield openai.OpenAI(
            base_url=f"{service.http_url}/v1", api_key="none", http_client=http, max_retries=8
        )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # the state is another process's


def test_the_second_question_about_a_file_reuses_its_kv(files_service: "Service") -> None:
    with client_of(files_service) as client:
        file = client.files.create(file=("notes.md", NOTES.encode()), purpose="user_data")

        def ask(question: str) -> Any:
            parts: Any = [
                {"type": "file", "file": {"file_id": file.id}},
                {"type": "text", "text": question},
            ]
            messages: Any = [{"role": "user", "content": parts}]
            answer = client.chat.completions.create(
                model="smollm2-135m", messages=messages, max_tokens=8, temperature=0
            )
            return answer.usage

        first = ask("What does the harbour keep?")
        second = ask("Who has debts?")
        assert first.prompt_tokens > 500
        assert first.prompt_tokens_details.cached_tokens < 100
        assert second.prompt_tokens_details.cached_tokens > 0.9 * second.prompt_tokens - 32

        long = client.files.create(file=("all.txt", NOTES.encode() * 20), purpose="user_data")
        parts: Any = [{"type": "file", "file": {"file_id": long.id}}]
        with pytest.raises(openai.BadRequestError, match=f"{long.id} .all.txt") as error:
            client.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": parts}]
            )
        assert "context length is 8192" in error.value.message


def router_of(service: "Service") -> psutil.Process:
    [router] = [each for each in service.family() if "ullage_router.main" in each.cmdline()]
    return router


def test_a_batch_outlives_its_router(files_service: "Service") -> None:
    words = ["tea", "iron", "snow", "jazz", "moss", "clay"]
    lines = []
    for i in range(NUM_LINES):
        messages = [{"role": "user", "content": f"Describe {words[i % 6]} in {i} words."}]
        body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 12, "temperature": 0}
        line = {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps(line | {"body": body}))

    with client_of(files_service) as client:
        data = "\n".join(lines).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4)
        killed = router_of(files_service)
        killed.kill()
        killed.wait(30)

        def state() -> str:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                return client.batches.retrieve(batch.id).status
            return ""

        until(lambda: state() == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.request_counts.completed == NUM_LINES
        assert done.error_file_id is None
        answers = [
            json.loads(line) for line in client.files.content(done.output_file_id).iter_lines()
        ]
        assert sorted(each["custom_id"] for each in answers) == sorted(
            f"line-{i}" for i in range(NUM_LINES)
        )
        for each in answers:
            assert each["response"]["body"]["choices"][0]["message"]["content"]
            assert each["response"]["body"]["model"] == "smollm2-135m"
