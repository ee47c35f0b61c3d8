"""A worker that stores KV as float8: a byte a number, in every figure that is told.

Swapping and preempting it is in tests/engine/worker/test_conv_cache.py.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.requests import EngineRequest

BLOCK_BYTES = 16 * 23_040 // 2
NUM_BLOCKS = 64
NUM_SLOTS = 16
FRANCE = [504, 3575, 282, 4649, 314]


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_smollm2_is_served_and_a_cached_prompt_is_answered_alike(
    start_worker: Callable[..., Any],
    make_request: Callable[..., EngineRequest],
    quantization: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By torch, and the file's own blocks by the C++ library."""
    seed = 20_261
    model = {"dtype": "float32", "kv_dtype": "fp8", "deterministic": True, "max_model_len": 64}
    model["quantization"] = quantization
    worker = start_worker(
        model=model,
        memory={"max_kv": NUM_BLOCKS * BLOCK_BYTES, "host_kv": NUM_SLOTS * BLOCK_BYTES},
        batching={"max_sequences": 2, "prefill_chunk_tokens": 16},
    )
    generator = random.Random(seed)
    prompt = [generator.randrange(5, 49_000) for _ in range(40)]
    answers = []
    for name, token_ids in {"france": FRANCE, "first": prompt, "again": prompt}.items():
        answers.append(worker.submit(make_request(name, token_ids, max_tokens=8)))
        worker.finish_all()
    assert answers[0].token_ids[:2] == [7042, 30], "Paris."
    assert answers[1].token_ids == answers[2].token_ids, f"seed {seed}"
    assert len(answers[1].token_ids) == 8, f"seed {seed}"
    state = worker.fresh_state()
    assert state.prefix_hit_tokens == 32
    lines = {entry.name: entry for entry in state.ledger}
    assert lines["kv_pool"].allocated_bytes == state.kv_pool_bytes == NUM_BLOCKS * BLOCK_BYTES
    assert lines["host_kv"].allocated_bytes == NUM_SLOTS * BLOCK_BYTES
    assert worker.stop() == 0
    computes = quantization != "none" and instruction_set() is not None
    assert (
        "the C++ library computes steps, with KV in float8" in capfd.readouterr().err
    ) == computes
