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


def test_a_leader_says_that_it_cannot_compute_on_several_nodes() -> None:
    one = EngineConfig(
        engine="vllm",
        model=ModelSection(source="file:///m", name="m"),
        gpus=4,
        parallelism=ParallelismSection(tensor=2, pipeline=2),
    )
    check(one)
    with pytest.raises(WorkerStartError, match=r"group\.nodes: engines on 2 nodes"):
        check(
            EngineConfig(
                engine="vllm",
                model=one.model,
                gpus=4,
                parallelism=one.parallelism,
                group=GroupSection(nodes=2),
            )
        )


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
