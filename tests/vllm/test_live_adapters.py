"""LoRA adapters that are edited while a whole service runs: engine, vLLM, router and HTTP."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig
from ullage_testing.local_service import Service, StartService, services
from ullage_testing.small_models import continue_greedily, write_adapter

from ullage_engine.tokenizer.tokenizer import load_tokenizer

PATIENCE_S = 300.0
OUTPUT = 12
PROMPT = list(range(300, 340))
MODEL = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.1,
    tie_word_embeddings=True,
)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[StartService]:
    with services(tmp_path_factory, weights_dir) as start_service:
        yield start_service


class Client:
    """A client of a service whose adapters it edits."""

    def __init__(self, service: Service) -> None:
        self._file = Path(service.state["run_dir"], "adapters", "adapters.yaml")
        self._http = httpx.Client(base_url=service.http_url, timeout=120.0)

    def close(self) -> None:
        self._http.close()

    def edit(self, **folders: Path) -> None:
        adapters = [
            {"name": name, "source": f"file://{folder}", "rank": 8}
            for name, folder in folders.items()
        ]
        self._file.with_suffix(".new").write_text(yaml.safe_dump({"adapters": adapters}))
        self._file.with_suffix(".new").replace(self._file)

    def names(self) -> list[str]:
        """The served models, the adapters among them."""
        return [each["id"] for each in self._http.get("/v1/models").json()["data"]]

    def answer(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": OUTPUT, "temperature": 0}
        return self._http.post("/v1/completions", json=body | {"ignore_eos": True})

    def text(self, model: str) -> str:
        response = self.answer(model)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def engine(self) -> dict[str, Any]:
        [engine] = self._http.get("/stats").json()["engines"]
        return dict(engine)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(1200)
def test_adapters_are_edited_while_a_service_runs(
    write_checkpoint: Callable[..., Path], start: StartService, tmp_path: Path
) -> None:
    folder = write_checkpoint(MODEL, seed=6)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = tmp_path / "first"
    second = tmp_path / "second"
    models = [base, write_adapter(first, base, 8, 1), write_adapter(second, base, 8, 2)]
    tokenizer = load_tokenizer(folder)
    of_base, of_first, of_second = (
        tokenizer.decode(continue_greedily(each, PROMPT, OUTPUT)) for each in models
    )
    assert len({of_base, of_first, of_second}) == 3

    manifest = tmp_path / "service.yaml"
    spec = {
        "engine": "VLLM",
        "device": "CPU",
        "model": {
            "source": f"file://{folder}",
            "name": "tiny",
            "dtype": "Float32",
            "maxModelLen": 512,
        },
        "memory": {
            "deviceBytes": "4Gi",
            "thresholdPercent": 100,
            "safetyReserve": 0,
            "maxKV": "64Mi",
            "maxLoras": 1,
        },
        "vllm": {"args": {"block_size": 32, "enforce_eager": True}},
    }
    document = {"apiVersion": "serving.ullage.dev/v1alpha1", "kind": "LLMService"}
    manifest.write_text(yaml.safe_dump(document | {"metadata": {"name": "tiny"}, "spec": spec}))
    service = start(manifest)
    with contextlib.closing(Client(service)) as client:
        before = {process.pid for process in service.family()}
        assert (client.names(), client.text("tiny")) == (["tiny"], of_base)
        assert client.answer("style").status_code == 404

        client.edit(style=first)
        until(lambda: client.names() == ["tiny", "style"])
        assert [client.text(name) for name in ("style", "tiny")] == [of_first, of_base]

        # One that is broken beside it, and another one in the same slot.
        (tmp_path / "broken").mkdir()
        client.edit(style=first, broken=tmp_path / "broken", other=second)
        until(lambda: client.names() == ["tiny", "other", "style"])
        assert client.answer("broken").status_code == 404
        assert [client.text(name) for name in ("other", "style")] == [of_second, of_first]

        # Other files under one name: neither its KV nor its weights are found any more.
        client.edit(style=second)
        until(lambda: client.names() == ["tiny", "style"])
        until(lambda: client.text("style") == of_second)

        client.edit()
        until(lambda: client.names() == ["tiny"])
        assert client.answer("style").status_code == 404
        assert client.text("tiny") == of_base
        assert {process.pid for process in service.family()} == before
        assert client.engine()["worker_restarts"] == 0
