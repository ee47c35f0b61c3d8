"""Several ranks on one node: they compute what one does, and no process outlives the others."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from ullage_testing.ports import free_port
from ullage_testing.small_models import continue_greedily, foreign_warnings_allowed
from ullage_testing.worker_link import WorkerProcess, launcher

from ullage_common.config.engine import ServerSection
from ullage_engine.protocol.errors import GROUP_LOST
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.worker_state import RankPlace
from ullage_engine.server.worker_env import vllm_env
from ullage_engine.vllm_worker.shared_memory import FOLDER, shared_memory_of

from .conftest import vllm_config

Launch = Callable[..., WorkerProcess]
BLOCK = 32
POOL = 8 << 20
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(write_checkpoint) -> Path:
    """Heads that two ranks can share, which SmolLM2's cannot be."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(LlamaConfig(**sizes, **heads, max_position_embeddings=1024), seed=3)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run_dir of all workers of this module."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def launch(
    checkpoint: Path,
    run_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    weights_dir: Path,
) -> Iterator[Launch]:
    """Launches workers of so many ranks, on so many nodes."""
    with launcher() as launch_command:

        def launch_one(
            tensor: int, pipeline: int = 1, folder: Path | None = None, **group: int
        ) -> WorkerProcess:
            folder = folder or tmp_path_factory.mktemp("w")
            config = vllm_config(
                f"file://{checkpoint}",
                gpus=tensor * pipeline,
                parallelism={"tensor": tensor, "pipeline": pipeline},
                memory={"device_bytes": 2 << 30, "max_kv": POOL},
                server={"weights_dir": str(weights_dir), "run_dir": str(run_dir)},
                group=group,
            )
            # A subset of YAML.
            (folder / "engine.yaml").write_text(json.dumps(config))
            command = [sys.executable, "-m", "ullage_engine.vllm_worker"]
            return launch_command(command, folder, vllm_env(1, tensor * pipeline))

        yield launch_one


@pytest.fixture(scope="module")
def pair(launch: Launch) -> Iterator[tuple[WorkerProcess, Any]]:
    """A worker with two stages of two ranks, and what it said when it was ready."""
    worker = launch(tensor=2, pipeline=2)
    return worker, worker.wait_ready()


@pytest.fixture
def worker(pair: tuple[WorkerProcess, Any]) -> WorkerProcess:
    return pair[0]


def test_each_rank_proves_its_part(pair: tuple[WorkerProcess, Any], weights_dir: Path) -> None:
    contents = [path.read_bytes().partition(b"\n")[2] for path in weights_dir.glob("vllm-*.proof")]
    found = [each for content in contents if len(each := json.loads(content)["ranks"]) == 4]
    assert found
    first, *others = found[0]
    assert len(first["samples"]) == 5
    assert [each["samples"] for each in others] == [[]] * 3
    tables = ["model.layers.0.self_attn.rotary_emb.cos_sin_cache" in first["tensors"]]
    tables += [any("cos_sin_cache" in name for name in each["tensors"]) for each in others]
    assert all(tables)


def make_request(name: str, token_ids: list[int], **fields: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(PROMPT),
        sampling=fields.pop("sampling", SamplingParams(temperature=0.0)),
        **{"max_tokens": 24, **fields},
    )


def ranks_of(worker: WorkerProcess) -> list[psutil.Process]:
    """The processes of its ranks, which vLLM names so."""
    return ranks_of_process(worker.process)


def ranks_of_process(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "VLLM::Worker" in " ".join(child.cmdline())]


def assert_nothing_is_left(processes: list[psutil.Process], run_dir: Path) -> None:
    assert psutil.wait_procs(processes, PATIENCE_S)[1] == []
    # What the next worker does first, on each of two nodes.
    for node in range(2):
        shared_memory_of(ServerSection(run_dir=str(run_dir)), node).sweep()
    assert files_of_ranks() <= BEFORE


def files_of_ranks() -> set[str]:
    names = ("vllm_dist_*", "psm_*", "nccl-*", "ullage-ranks-*")
    return {path.name for name in names for path in FOLDER.glob(name)}


BEFORE = files_of_ranks()
"""Those of other programs."""


def test_four_ranks_compute_what_one_does(worker: WorkerProcess, checkpoint: Path) -> None:
    answer = worker.submit(make_request("greedy", PROMPT))
    worker.finish_all()
    with foreign_warnings_allowed():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert answer.token_ids == continue_greedily(model, PROMPT, 24)
    assert answer.finish == "length"


def test_a_seeded_answer_goes_on_on_all_ranks(worker: WorkerProcess) -> None:
    sampling = SamplingParams(seed=5, presence_penalty=1.0)
    whole = worker.submit(make_request("whole", PROMPT, sampling=sampling))
    worker.finish_all()
    sent = PROMPT + whole.token_ids[:9]
    rest = worker.submit(make_request("rest", sent, sampling=sampling), resumed=True)
    worker.finish_all()
    assert len(whole.token_ids) == 24
    assert rest.token_ids == whole.token_ids[9:]


def test_memory_and_places_are_those_of_all_ranks(pair: tuple[WorkerProcess, Any]) -> None:
    worker, ready = pair
    layers = {"num_layers": 2, "num_attention_layers": 2}
    heads = {"num_heads": 2, "num_kv_heads": 1, "device": "cpu"}
    assert ready.ranks == [
        RankPlace(rank=0, stage=0, tensor_rank=0, first_layer=0, **layers, **heads),
        RankPlace(rank=1, stage=0, tensor_rank=1, first_layer=0, **layers, **heads),
        RankPlace(rank=2, stage=1, tensor_rank=0, first_layer=2, **layers, **heads),
        RankPlace(rank=3, stage=1, tensor_rank=1, first_layer=2, **layers, **heads),
    ]
    # Keys and values of 4 layers, 2 heads of 32 numbers, 4 bytes each: on all ranks together.
    token_bytes = 2 * 4 * 2 * 32 * 4
    assert ready.profile.groups[0].bytes_per_token == token_bytes
    num_blocks = 4 * POOL // (BLOCK * token_bytes)
    assert ready.profile.kv_pool_bytes == (num_blocks - 1) * BLOCK * token_bytes
    reserved = {each.name: each.reserved_bytes for each in ready.state.ledger}
    assert reserved["kv_pool"] == 4 * POOL
    assert ready.state.total_bytes == 4 * (2 << 30)
    used = sum(each.memory_info().rss for each in ranks_of(worker))
    # Each rank has PyTorch and a context of its own.
    assert len(ranks_of(worker)) == 4
    assert used < worker.fresh_state().rss_bytes <= ready.state.total_bytes
    assert reserved["context"] + reserved["model"] > used / 2


def test_a_worker_that_stops_leaves_nothing(worker: WorkerProcess, run_dir: Path) -> None:
    ranks = ranks_of(worker)
    assert worker.stop() == 0
    assert_nothing_is_left(ranks, run_dir)


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_worker_ends_when_one_of_its_ranks_does(
    launch: Launch, run_dir: Path, is_busy: bool
) -> None:
    worker = launch(tensor=2)
    worker.wait_ready()
    ranks = ranks_of(worker)
    if is_busy:
        answer = worker.submit(make_request("long", PROMPT, max_tokens=900))
        worker.wait_for(lambda: len(answer.token_ids) > 3)
    ranks[1].kill()
    assert worker.process.wait(PATIENCE_S) == GROUP_LOST
    assert_nothing_is_left(ranks, run_dir)


def test_no_rank_outlives_its_worker(launch: Launch, run_dir: Path) -> None:
    worker = launch(tensor=2)
    worker.wait_ready()
    ranks = ranks_of(worker)
    # As a rank is that waits for another one.
    ranks[0].suspend()
    worker.process.kill()
    assert_nothing_is_left(ranks, run_dir)


@contextmanager
def follower(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The second node of an engine, on this machine."""
    command = [sys.executable, "-m", "ullage_engine.vllm_worker", "--follow"]
    command += ["--config", str(config), "--index", "0", "--leader", "127.0.0.1"]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_nodes_compute_what_one_does_and_end_together(
    launch: Launch,
    checkpoint: Path,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    ports = {"join_port": free_port(), "vllm_port": free_port()}
    worker = launch(tensor=1, pipeline=2, folder=tmp_path, nodes=2, **ports)
    with follower(tmp_path / "engine.yaml") as other:
        worker.wait_ready()
        assert [each.stage for each in worker.loading].count("followers") >= 2
        [rank], [further] = ranks_of(worker), ranks_of_process(other)
        answer = worker.submit(make_request("greedy", PROMPT))
        worker.finish_all()
        with foreign_warnings_allowed():
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert answer.token_ids == continue_greedily(model, PROMPT, 24)
        other.terminate()
        answer = worker.submit(make_request("after", PROMPT))
        worker.finish_all()
        assert answer.finish == "length"
        worker.process.kill()
        assert other.wait(PATIENCE_S) == 0
    assert_nothing_is_left([rank, further], run_dir)
