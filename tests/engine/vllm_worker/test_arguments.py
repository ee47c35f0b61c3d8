"""What a configuration becomes for vLLM, and what it may not say."""

from pathlib import Path

import pytest

from ullage_common.config.engine import (
    OWNED_VLLM_ARGS,
    AdapterSection,
    BatchingSection,
    EngineConfig,
    GroupSection,
    ModelSection,
    ParallelismSection,
)
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.arguments import check, engine_args

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


def test_a_leader_says_that_it_cannot_compute_on_several_nodes() -> None:
    check(configured(4, 2, 2))
    with pytest.raises(WorkerStartError, match=r"group\.nodes: engines on 2 nodes"):
        check(configured(4, 2, 2, nodes=2))


def test_ranks_are_as_many_as_gpus() -> None:
    with pytest.raises(WorkerStartError, match=r"^parallelism: tensor 2 times pipeline 1 is not"):
        check(configured(4, 2, 1))


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
