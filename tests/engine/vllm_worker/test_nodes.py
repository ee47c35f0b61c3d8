"""An engine with vLLM that the operator plans on several nodes."""

import pytest

from ullage_common.config.engine import (
    EngineConfig,
    GroupSection,
    ModelSection,
    ParallelismSection,
)
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.arguments import check


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
