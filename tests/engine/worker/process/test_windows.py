"""A worker that serves a small gpt-oss: the ledger shows what its windows really take."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ullage_engine.protocol.requests import EngineRequest

LAYER_BYTES = 2 * 2 * 16 * 4
"""Keys and values of a token in one layer: 2 KV heads of 16 float32 numbers."""
LONGEST = 256
CHUNK = 32
WINDOW = 20


def test_the_pool_of_one_longest_sequence_is_smaller_by_its_windows(
    start_worker: Callable[..., Any],
    make_request: Callable[..., EngineRequest],
    random_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Two of four layers have windows: 16 blocks of two layers, and 5 instead of 16 of the others.

    A pool of whole blocks of this size would end the sequence at 160 tokens.
    """
    seed = 20_261
    random_model("gpt_oss", seed).save_pretrained(tmp_path)
    block = 16 * 2 * LAYER_BYTES
    most = -(-(WINDOW - 1 + CHUNK) // 16) + 1
    worker = start_worker(
        model={"source": f"file://{tmp_path}", "dtype": "float32", "max_model_len": LONGEST},
        memory={"max_kv": (16 + most) * block},
        batching={"max_sequences": 2, "prefill_chunk_tokens": CHUNK},
    )
    prompt = [random.Random(seed).randrange(199) for _ in range(150)]
    answer = worker.submit(make_request("a", prompt, max_tokens=LONGEST))
    worker.finish_all()
    assert (answer.finish, len(answer.token_ids)) == ("length", LONGEST - 150), f"seed {seed}"
    assert answer.num_preemptions == 0
    state = worker.fresh_state()
    lines = {line.name: line for line in state.ledger}
    assert lines["kv_pool"].allocated_bytes == (16 + 5) * block < 32 * block
    assert state.headroom_bytes == state.kv_pool_bytes
    assert worker.stop() == 0
