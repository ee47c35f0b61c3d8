"""After warm-up a worker's memory is what its ledger says, whatever it serves."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.protocol.requests import EngineRequest, SamplingParams

MakeRequest = Callable[..., EngineRequest]
MIB = 1 << 20


@pytest.mark.parametrize("num_requests", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_mixed_requests_neither_grow_memory_nor_leave_the_ledger(
    start_worker: Callable[..., Any], make_request: MakeRequest, num_requests: int
) -> None:
    worker = start_worker()
    before = worker.rss
    generator = random.Random(5)
    answers = []
    for number in range(num_requests):
        request = mixed_request(generator, number, make_request)
        answers.append(worker.submit(request, resumed=True))
    worker.finish_all()
    state = worker.fresh_state()
    after = worker.rss

    assert {answer.finish for answer in answers} <= {"length", "stop"}
    allocated = sum(entry.allocated_bytes for entry in state.ledger)
    assert abs(after - before) <= 4 * MIB
    assert abs(after - allocated) <= 0.01 * allocated
    assert state.kv_free_bytes + state.kv_reclaimable_bytes == state.kv_pool_bytes
    assert state.kv_committed_bytes == 0
    assert worker.stop() == 0


def mixed_request(
    generator: random.Random, number: int, make_request: MakeRequest
) -> EngineRequest:
    """Short outputs after prompts of all lengths, sampled in all ways."""
    length = 400 if number % 50 == 0 else generator.randint(1, 24)
    return make_request(
        f"r{number}",
        [generator.randrange(5, 49_000) for _ in range(length)],
        max_tokens=generator.randint(1, 8),
        sampling=SamplingParams(
            temperature=generator.choice([0.0, 0.7]),
            top_p=generator.choice([1.0, 0.9]),
            top_k=generator.choice([0, 40]),
            repetition_penalty=generator.choice([1.0, 1.2]),
            top_logprobs=generator.choice([None, 3]),
            seed=number,
        ),
    )
