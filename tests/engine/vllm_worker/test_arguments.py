"""What a configuration becomes for vLLM, and what it may not say."""

import re
from pathlib import Path
from typing import Any

import pytest

from ullage_common.config.engine import (
    OWNED_VLLM_ARGS,
    AdapterSection,
    BatchingSection,
    EngineConfig,
    GroupSection,
    MemorySection,
    ModelSection,
    ParallelismSection,
    choose_engine,
    refusal_by_vllm,
)
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.arguments import Node, check, engine_args

TUNABLE = {"enforce_eager", "max_loras", "max_cpu_loras"}
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


def test_ranks_are_as_many_as_gpus() -> None:
    with pytest.raises(WorkerStartError, match=r"^parallelism: tensor 2 times pipeline 1 is not"):
        check(configured(4, 2, 1))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quantization": "int8"}, "model.quantization: int8"),
        ({"quantization": "int4"}, "model.quantization: int4"),
        ({"quantization": "w8a8"}, "model.quantization: w8a8"),
        ({"deterministic": True}, "model.deterministic"),
        ({"memory": MemorySection(host_kv=1)}, "memory.host_kv"),
        ({"adapters": (AdapterSection(name="a", source="file:///a", rank=513),)}, "adapters: rank"),
    ],
)
def test_auto_leaves_to_the_native_engine_what_the_worker_refuses(
    changes: dict[str, Any], field: str
) -> None:
    memory = changes.pop("memory", MemorySection())
    adapters = changes.pop("adapters", ())
    model = ModelSection(source="file:///m", name="m", **changes)
    config = EngineConfig(model=model, memory=memory, adapters=adapters)
    with pytest.raises(WorkerStartError, match=f"^{re.escape(field)}") as refusal:
        check(config)
    engine, reason = choose_engine(
        "auto",
        on_cuda=True,
        has_vllm=True,
        vllm_refusal=refusal_by_vllm(model, memory, adapters),
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
    given = engine_args(config, Path("/m"), "bfloat16", None)
    assert given.keys() - OWNED_VLLM_ARGS.keys() == TUNABLE
