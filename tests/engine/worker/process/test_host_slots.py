"""A deterministic worker with host memory for swapped KV: its ledger holds all of it."""

import random
from collections.abc import Callable
from typing import Any

import torch

from ullage_engine.model_config.dtypes import resolve_dtype
from ullage_engine.protocol.requests import EngineRequest, SamplingParams

MIB = 1 << 20
ITEMSIZE = resolve_dtype("auto", torch.device("cpu")).itemsize  # of what this processor computes in
BLOCK_BYTES = 16 * 11_520 * ITEMSIZE  # of SmolLM2


def test_memory_stays_what_the_ledger_says(
    start_worker: Callable[..., Any], make_request: Callable[..., EngineRequest]
) -> None:
    worker = start_worker(model={"deterministic": True}, memory={"host_kv": 64 * MIB})
    before = worker.rss
    generator = random.Random(6)
    for number in range(60):
        length = 400 if number % 20 == 0 else generator.randint(1, 40)
        tokens = [generator.randrange(5, 49_000) for _ in range(length)]
        sampling = SamplingParams(temperature=number % 2 / 2, top_p=0.9, seed=number)
        worker.submit(
            make_request(f"r{number}", tokens, max_tokens=6, sampling=sampling), resumed=True
        )
    worker.finish_all()
    state = worker.fresh_state()
    lines = {entry.name: entry for entry in state.ledger}
    allocated = sum(entry.allocated_bytes for entry in state.ledger)
    assert lines["host_kv"].allocated_bytes == 64 * MIB // BLOCK_BYTES * BLOCK_BYTES
    assert state.swap_bytes_per_second > 0
    assert abs(worker.rss - before) <= 0.01 * allocated
    assert abs(worker.rss - allocated) <= 0.01 * allocated
    assert worker.stop() == 0
