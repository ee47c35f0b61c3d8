"""What a rank decides at its start, and says of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.config.engine import (
    BatchingSection,
    EngineConfig,
    MemorySection,
    ModelSection,
    ServerSection,
    kv_limit,
)
from ullage_engine.memory.ledger import Ledger, LedgerError
from ullage_engine.model_config.dtypes import cpu_computes_bfloat16
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.scheduler.batch_plan import PromptCost
from ullage_engine.worker.rank import RankStartup, chunk_tokens, fitting_blocks, measured_cost

SIZES = {"vocab_size": 208, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}


def test_what_computes_and_why_is_said_once(
    tmp_path: Path, random_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    random_model("llama", 1, **SIZES).save_pretrained(tmp_path / "model")
    own = {torch.bfloat16: "the C++ library computes steps, with KV in bfloat16"}
    own[torch.float32] = own[torch.bfloat16].replace("bfloat16", "float32")
    for dtype, quantization, kv_type, expected in (
        ("auto", "int8", torch.bfloat16, own[torch.bfloat16]),
        ("bfloat16", "int8", torch.bfloat16, own[torch.bfloat16]),
        ("float32", "int8", torch.float32, own[torch.float32]),
        ("float16", "int8", torch.float16, "model.dtype is float16; set auto"),
        ("float32", "none", torch.float32, "matrices such as embedding are not int8 or int4"),
    ):
        config = EngineConfig(
            model=ModelSection(
                source=f"file://{tmp_path}/model",
                name="m",
                dtype=dtype,
                quantization=quantization,
                max_model_len=256,
            ),
            device="cpu",
            batching=BatchingSection(max_sequences=4),
            server=ServerSection(weights_dir=str(tmp_path), threads=torch.get_num_threads()),
        )
        rank = RankStartup(config, 0, lambda loading: None)
        rank.load()
        caplog.clear()
        with caplog.at_level(logging.INFO, "ullage.engine.worker"):
            rank.allocate_arenas()
        lines = [line for line in caplog.messages if "computes steps" in line]
        if instruction_set() is None:
            expected = "the library cannot be used on this machine"
            kv_type = rank.dtype
        assert len(lines) == 1, (dtype, quantization)
        assert expected in lines[0]
        assert rank.kv_type == kv_type
        is_slow = dtype == "bfloat16" and instruction_set() is None and not cpu_computes_bfloat16()
        assert any("emulates" in line for line in caplog.messages) == is_slow


@pytest.mark.parametrize("is_free", [True, False])
def test_a_chunk_costs_no_more_behind_a_long_context_than_it_may(is_free: bool) -> None:
    # 8 billion weights on two cores: 40 ms a token, and as much again for 9,000 of context.
    cost = measured_cost(0.04, 0.04 / 9000, 128, 30.0, is_free=is_free)
    limit_s = 128 * 0.04 * (1 + 64 / 9000) if is_free else 7.5
    assert cost.tokens_within(cost.step_budget, 0, 128) == 128
    for start in (9_000, 70_000, 130_000):
        count = cost.tokens_within(cost.step_budget, start, 128)
        seconds = 0.04 * count * (1 + (start + count / 2) / 9000)
        assert 0.9 * limit_s < seconds <= limit_s


def test_a_fast_processor_computes_whole_chunks_as_deep_as_half_a_second_allows() -> None:
    cost = measured_cost(1e-4, 1e-4 / 1500, 512, 30.0, is_free=True)
    assert cost.tokens_within(cost.step_budget, 8_000, 512) == 512
    assert cost.tokens_within(cost.step_budget, 30_000, 512) < 300


def test_chunks_that_are_configured_shrink_only_for_the_deadline() -> None:
    cost = measured_cost(1e-3, 1e-3 / 4000, 2048, 30.0, is_free=False)
    assert cost.tokens_within(cost.step_budget, 8_000, 2048) == 2048
    assert cost.tokens_within(cost.step_budget, 60_000, 2048) < 500
    # Even at the beginning, where a chunk would take longer than a worker may.
    assert measured_cost(0.1, 0.0, 2048, 30.0, is_free=False).step_budget == 75
    assert measured_cost(0.0, 0.0, 2048, 30.0, is_free=False) == PromptCost()


def test_chunks_take_half_a_second_within_bounds() -> None:
    assert chunk_tokens(2e-3, 512) == 192  # 250 tokens, in units of 64
    assert chunk_tokens(1e-5, 512) == 512
    assert chunk_tokens(1.0, 512) == 128
    assert chunk_tokens(0.0, 512) == 512
    assert chunk_tokens(1.0, 100) == 100


GIB = 1 << 30
MIB = 1 << 20


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    weights=st.integers(0, 4 * GIB),
    max_kv=st.none() | st.integers(2 * GIB, 300 * GIB),
    on_cpu=st.booleans(),
)
def test_kv_takes_what_its_limit_and_the_device_leave(
    total: int, weights: int, max_kv: int | None, on_cpu: bool
) -> None:
    memory = MemorySection() if max_kv is None else MemorySection(max_kv=max_kv)
    ledger = Ledger(total, memory.threshold, configurable=on_cpu)
    ledger.record("weights", weights)
    blocks = fitting_blocks(ledger, kv_limit(memory, on_cpu=on_cpu), 2 * MIB, chunk_blocks=16)
    left = int(total * 0.85) - weights
    default = 20 * GIB if on_cpu else left
    assert blocks == min(left, default if max_kv is None else max_kv) // (2 * MIB)


def test_kv_that_holds_no_chunk_is_refused_by_the_name_of_what_bounds_it() -> None:
    ledger = Ledger(GIB, 0.85, configurable=False)
    with pytest.raises(WorkerStartError, match=r"maxKV: 64 MiB is less than the 512 MiB of KV"):
        fitting_blocks(ledger, 64 * MIB, 2 * MIB, 256)
    with pytest.raises(LedgerError, match=r"memory\.thresholdPercent: kv_pool needs 2048 MiB"):
        fitting_blocks(ledger, None, 2 * MIB, 1024)
