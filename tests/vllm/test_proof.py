"""Every start of vLLM is compared with a verified one before it serves."""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
import yaml
from transformers import BertConfig, LlamaConfig
from ullage_testing.ports import free_port

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.protocol.errors import ProofError
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.vllm_worker.interface import InvalidRequestError
from ullage_engine.vllm_worker.proof import changed_table
from ullage_engine.vllm_worker.ranks import WorkerExtension

from .conftest import vllm_config

PATIENCE_S = 300.0
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    max_position_embeddings=2048,
    initializer_range=0.1,
    **HEADS,
)
DIFFERS = r"^this start computes otherwise than the verified start of .*\.proof: "

Start = Callable[..., Any]
Change = Callable[[torch.nn.Module], None]


@pytest.fixture(scope="module")
def checkpoint(write_checkpoint: Any) -> Path:
    folder: Path = write_checkpoint(LLAMA, seed=3)
    return folder


@pytest.fixture
def start(start_here: Any, checkpoint: Path, weights_dir: Path) -> Iterator[Start]:
    """Starts the engine, the first time without a proof."""
    forget_proofs(weights_dir)
    yield lambda **sections: start_here(checkpoint, **sections)
    forget_proofs(weights_dir)


def forget_proofs(folder: Path) -> None:
    for path in folder.glob("vllm-*.proof"):
        path.unlink()


@pytest.fixture
def change_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Has a loaded model changed at every start from now on."""
    warm_up = WorkerExtension.ullage_warm_up

    def change_by(change: Change) -> None:
        def changed(self: Any) -> float:
            change(self.model_runner.get_model())
            return warm_up(self)

        monkeypatch.setattr(WorkerExtension, "ullage_warm_up", changed)

    return change_by


def only_proof(folder: Path) -> Path:
    [path] = folder.glob("vllm-*.proof")
    return path


def damage(path: Path, share: float) -> None:
    """Write a proof whose first number is another one, by a share of the spread of its row."""
    stored = json.loads(path.read_bytes().partition(b"\n")[2])
    first = stored["ranks"][0]
    row = first["samples"][0]
    row[1] += share * (max(row) - min(row))
    first["logits"] = "0" * len(first["logits"])
    content = json.dumps(stored).encode()
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def test_every_start_computes_as_the_first_one_and_leaves_nothing(
    start: Start, weights_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ullage.engine.weights")
    start()
    assert "this start is verified" in caplog.messages
    first = only_proof(weights_dir).read_bytes()
    stored = json.loads(first.partition(b"\n")[2])
    [rank] = stored["ranks"]
    assert "model.layers.0.self_attn.rotary_emb.cos_sin_cache" in rank["tensors"]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= rank["tensors"].keys()
    assert [len(row) for row in rank["samples"]] == [21] * 5
    assert stored["facts"]["vllm"]
    assert stored["facts"]["probe"] == "[(32, 3), (16, 2)]"

    caplog.clear()
    started = start()
    assert "this start computes as a verified one does" in caplog.messages
    assert only_proof(weights_dir).read_bytes() == first

    blocks = started.core.blocks
    pool = started.core._scheduler.kv_cache_manager.block_pool
    assert blocks.num_free == blocks.num_blocks
    assert len(pool.cached_block_hash_to_block) == 0
    stats = started.engine.stats()
    assert (stats.num_steps, stats.prefix_lookup_tokens, stats.num_running) == (0, 0, 0)
    request = EngineRequest(
        request_id="r",
        token_ids=list(range(100, 140)),
        num_prompt_tokens=40,
        max_tokens=4,
        sampling=SamplingParams(temperature=0.0),
    )
    assert started.engine.submit_group([request]) == []
    outputs = []
    while started.engine.has_work:
        outputs += started.engine.step()
    assert sum(len(each.token_ids) for each in outputs) == 4


def test_a_proof_beyond_the_bound_ends_the_start_and_one_within_does_not(
    start: Start, weights_dir: Path
) -> None:
    start()
    damage(only_proof(weights_dir), 0.0005)
    start()
    damage(only_proof(weights_dir), 0.01)
    with pytest.raises(
        ProofError, match=DIFFERS + r"logits of the probe differ by .*may by 0\.001;"
    ):
        start()


@pytest.mark.parametrize("most", [0, -1])
def test_the_probe_asks_for_more_than_requests_may(
    start: Start, weights_dir: Path, most: int
) -> None:
    start(vllm={"args": {"max_logprobs": most}})
    stored = json.loads(only_proof(weights_dir).read_bytes().partition(b"\n")[2])
    assert [len(row) for row in stored["ranks"][0]["samples"]] == [21] * 5
    damage(only_proof(weights_dir), 0.0005)
    core = start(vllm={"args": {"max_logprobs": most}}).core

    sampling = SamplingParams(temperature=0.0, top_logprobs=2)
    request = EngineRequest(
        request_id="r", token_ids=[1, 2], num_prompt_tokens=2, max_tokens=1, sampling=sampling
    )
    if most >= 0:
        with pytest.raises(InvalidRequestError, match=f"max allowed: {most}"):
            core.add(request, 1)
    else:
        core.add(request, 1)


def flip_weight(model: torch.nn.Module) -> None:
    weight: torch.Tensor = model.model.norm.weight.data  # type: ignore[union-attr, assignment]
    weight.view(torch.int32)[3] ^= 1


def test_a_flipped_weight_ends_the_start(
    start: Start, change_model: Callable[[Change], None]
) -> None:
    start()
    change_model(flip_weight)
    with pytest.raises(ProofError, match=DIFFERS + r"model\.norm\.weight has other bits"):
        start()


def scale_logits(factor: float) -> Change:
    def change(model: Any) -> None:
        exact = model.compute_logits
        model.compute_logits = lambda *args, **kwargs: exact(*args, **kwargs) * factor

    return change


def test_a_kernel_that_computes_otherwise_ends_the_start(
    start: Start, change_model: Callable[[Change], None]
) -> None:
    start()
    change_model(scale_logits(1.0 + 2.0**-20))
    start()
    change_model(scale_logits(1.01))
    with pytest.raises(ProofError, match=DIFFERS + "logits of the probe differ by"):
        start()


@contextlib.contextmanager
def damaged_tables(change_model: Callable[[Change], None]) -> Iterator[None]:
    """Has half of each table wrong by 1.5e-4, as torch has computed one; vLLM keeps tables in the
    process for the next model, so they are put right in the end."""
    damaged: list[tuple[Any, torch.Tensor]] = []

    def change(model: torch.nn.Module) -> None:
        for module in model.modules():
            table = getattr(module, "cos_sin_cache", None)
            if table is not None:
                damaged.append((module, table))
                module.cos_sin_cache = table.clone()
                module.cos_sin_cache[len(table) // 2 :] += 1.5e-4

    change_model(change)
    try:
        yield
    finally:
        for module, table in damaged:
            module.cos_sin_cache = table
    assert damaged


def test_a_damaged_table_ends_every_start(
    start: Start, change_model: Callable[[Change], None], weights_dir: Path
) -> None:
    with (
        damaged_tables(change_model),
        pytest.raises(ProofError, match=r"rotary_emb is computed otherwise a second time"),
    ):
        start()
    assert not list(weights_dir.glob("vllm-*.proof"))
    change_model(lambda model: None)
    start()
    with (
        damaged_tables(change_model),
        pytest.raises(ProofError, match=DIFFERS + r".*cos_sin_cache has other bits"),
    ):
        start()


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "deepseek": {
        "rope_type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "sections": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROPES)
def test_every_kind_of_table_is_computed_the_same_again(kind: str, dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(VllmConfig()):
            parameters = {"rope_theta": 10_000.0, **ROPES[kind]}
            rope = get_rope(64, 1024, rope_parameters=parameters, dtype=dtype)
    finally:
        torch.set_default_dtype(usual)
    assert changed_table(torch.nn.ModuleList([rope]), dtype) == ""


def test_embeddings_are_proven_too(
    start_here: Any, write_checkpoint: Any, weights_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ullage.engine.weights")
    forget_proofs(weights_dir)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = write_checkpoint(BertConfig(**sizes, num_attention_heads=2), encoder=True)
    for words in ("this start is verified", "this start computes as a verified one does"):
        start_here(folder, model={"max_model_len": 256})
        assert words in caplog.messages
    stored = json.loads(only_proof(weights_dir).read_bytes().partition(b"\n")[2])
    assert [len(row) for row in stored["ranks"][0]["samples"]] == [64]
    forget_proofs(weights_dir)


@contextlib.contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an engine's server, which ends without an error."""
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ullage_engine.main", "--config", str(path)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield process
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the server has ended"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def num_failures(port: int) -> int:
    """Return `ullage_start_proof_failures_total`; -1 before the server answers."""
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        [line] = [each for each in lines if each.startswith("ullage_start_proof_failures_total")]
        return int(float(line.split()[-1]))
    return -1


@pytest.mark.timeout(900)
def test_three_starts_that_compute_otherwise_leave_the_engine_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    grpc_port = free_port()
    metrics_port = free_port()
    config = vllm_config(
        f"file://{checkpoint}",
        server={
            "threads": 1,
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "run_dir": str(tmp_path),
            "weights_dir": str(tmp_path),
        },
    )

    def ask() -> pb.GenerateResponse:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[100, 101, 102]), stop=pb.StopConditions(max_tokens=2)
        )
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            *_, last = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                request, timeout=PATIENCE_S, wait_for_ready=True
            )
        return last

    def serves() -> bool:
        with contextlib.suppress(grpc.RpcError):  # it loads
            return bool(ask().finished.usage.completion_tokens == 2)
        return False

    with serving(config, tmp_path) as server:
        wait_for(serves, server)
        assert num_failures(metrics_port) == 0
        damage(only_proof(tmp_path), 0.5)
        [worker] = psutil.Process(server.pid).children()
        worker.kill()
        wait_for(lambda: num_failures(metrics_port) == 3, server)
        with pytest.raises(grpc.RpcError) as raised:
            ask()
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
        assert error.message.startswith("3 starts in a row failed their proof, the last one: this")
        assert server.poll() is None
    assert "this engine stays out: 3 starts in a row" in (tmp_path / "log").read_text()
