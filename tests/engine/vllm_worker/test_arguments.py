"""What a configuration becomes for vLLM, and what it may not say."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from ullage_common.config.engine import (
    OWNED_VLLM_ARGS,
    AdapterSection,
    BatchingSection,
    EngineConfig,
    GroupSection,
    MemorySection,
    ModelSection,
    ParallelismSection,
    VllmSection,
    choose_engine,
    refusal_by_vllm,
)
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.arguments import Node, check, engine_args

TUNABLE = {"enforce_eager"}
"""What the worker gives a value that people may change."""


def configured(gpus: int, tensor: int, pipeline: int, nodes: int = 1) -> EngineConfig:
    return EngineConfig(
        engine="vllm",
        model=ModelSection(source="file:///m", name="m"),
        gpus=gpus,
        parallelism=ParallelismSection(tensor=tensor, pipeline=pipeline),
        group=GroupSection(nodes=nodes),
    )


def test_each_node_knows_its_place_among_those_of_its_engine() -> None:
    config = configured(4, 2, 2, nodes=2)
    check(config)
    names = ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend")
    given = engine_args(config, Path("/m"), "bfloat16", 0.5, Node(1, "10.0.0.1"))
    assert [given[name] for name in names] == [2, 1, "10.0.0.1", 29501, "mp"]
    assert set(names) <= OWNED_VLLM_ARGS.keys()
    assert not set(names) & engine_args(config, Path("/m"), "bfloat16", 0.5).keys()


def test_mistrals_own_files_are_left_alone_beside_those_of_transformers(tmp_path: Path) -> None:
    config = configured(1, 1, 1)

    def load_format() -> str | None:
        return engine_args(config, tmp_path, "bfloat16", 0.5).get("load_format")

    (tmp_path / "consolidated.safetensors").touch()
    assert load_format() is None
    (tmp_path / "model.safetensors").touch()
    assert load_format() == "safetensors"
    (tmp_path / "consolidated.safetensors").unlink()
    assert load_format() is None


def test_ranks_are_as_many_as_gpus() -> None:
    with pytest.raises(WorkerStartError, match=r"^parallelism: tensor 2 times pipeline 1 is not"):
        check(configured(4, 2, 1))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quantization": "int8"}, "model.quantization: only the native engine has int8"),
        ({"quantization": "int4"}, "model.quantization: only the native engine has int4"),
        ({"quantization": "w8a8"}, "model.quantization: only the native engine has w8a8"),
        ({"deterministic": True}, "model.deterministic"),
        ({"memory": MemorySection(host_kv=1)}, "memory.host_kv"),
    ],
)
def test_auto_leaves_to_the_native_engine_what_the_worker_refuses(
    changes: dict[str, Any], field: str
) -> None:
    memory = changes.pop("memory", MemorySection())
    model = ModelSection(source="file:///m", name="m", **changes)
    config = EngineConfig(model=model, memory=memory)
    with pytest.raises(WorkerStartError, match=f"^{re.escape(field)}") as refusal:
        check(config)
    engine, reason = choose_engine(
        "auto",
        on_cuda=True,
        has_vllm=True,
        vllm_refusal=refusal_by_vllm(model, memory),
    )
    assert (engine, reason) == ("native", f"vLLM refuses {refusal.value}")


@pytest.mark.parametrize("chunk_tokens", [0, 512])
def test_people_set_nothing_that_the_worker_sets(chunk_tokens: int) -> None:
    config = EngineConfig(
        engine="vllm",
        model=ModelSection(source="file:///m", name="m"),
        adapters=(AdapterSection(name="a", source="file:///a", rank=8),),
        batching=BatchingSection(prefill_chunk_tokens=chunk_tokens),
    )
    given = engine_args(config, Path("/m"), "bfloat16", None, adapter_slots=1)
    assert given.keys() - OWNED_VLLM_ARGS.keys() == TUNABLE


@pytest.mark.parametrize(("device_share", "num_slots"), [(None, 3), (0.5, 2)])
def test_slots_are_those_of_adapters_and_on_cpus_one_more(
    device_share: float | None, num_slots: int
) -> None:
    memory = MemorySection(max_loras=2, max_lora_rank=40)
    config = structs.replace(configured(1, 1, 1), memory=memory)
    given = engine_args(config, Path("/m"), "bfloat16", device_share, adapter_slots=2)
    assert (given["max_loras"], given["max_cpu_loras"]) == (num_slots, num_slots)
    assert given["max_lora_rank"] == 64


@pytest.mark.parametrize("name", ["max_loras", "max_cpu_loras"])
def test_slots_are_decided_by_memory(name: str) -> None:
    with pytest.raises(ValueError, match=f"args.{name} is not yours to set; .*memory.max_loras"):
        VllmSection(args={name: 4})


@pytest.mark.parametrize("percent", [0, 100.5])
def test_the_share_of_adapters_is_one_of_the_device(percent: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$.adapter_percent"):
        msgspec.convert({"adapter_percent": percent}, MemorySection)
