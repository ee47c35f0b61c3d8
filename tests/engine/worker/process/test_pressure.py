"""Memory pressure in the real worker, and a bound from the server: the batch shrinks, and comes
back."""

from collections.abc import Callable
from typing import Any

from ullage_engine.protocol.messages import EngineRequest, LimitBatch

BLOCK_BYTES = 16 * 23_040
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]


def test_a_pressure_event(
    start_worker: Callable[..., Any], make_request: Callable[..., EngineRequest]
) -> None:
    """Each request is promised 4 of 64 blocks; six of them leave less than 0.7 of the pool."""
    worker = start_worker(
        model={"dtype": "bfloat16", "max_model_len": 256},
        memory={"max_kv": 64 * BLOCK_BYTES},
        degrade={
            "hysteresis_percent": 10,
            "pressure_levels": [{"below_percent": 70, "batch_percent": 25}],
        },
    )
    assert worker.state.pressure_level == 0
    for i in range(6):
        worker.submit(make_request(f"early-{i}", PROMPT, max_tokens=48))
    worker.wait_for(lambda: worker.state.pressure_level == 1)
    for i in range(3):
        worker.submit(make_request(f"late-{i}", PROMPT, max_tokens=16))
    worker.wait_for(lambda: worker.state.num_running + worker.state.num_waiting == 9)
    # A quarter of the batch of eight: those that run go on, and none starts beside them.
    assert (worker.state.num_running, worker.state.num_waiting) == (6, 3)
    worker.finish_all()
    assert all(answer.finish == "length" for answer in worker.answers.values())
    assert [len(answer.token_ids) for answer in worker.answers.values()] == [48] * 6 + [16] * 3
    assert worker.fresh_state().pressure_level == 0

    worker.send(LimitBatch(share=0.125))
    worker.wait_for(lambda: worker.state.batch_share == worker.state.batch_limit == 0.125)
    for i in range(2):
        worker.submit(make_request(f"hot-{i}", PROMPT, max_tokens=48))
    worker.wait_for(lambda: worker.state.num_running + worker.state.num_waiting == 2)
    assert (worker.state.num_running, worker.state.num_waiting) == (1, 1)
    worker.send(LimitBatch(share=1.0))
    worker.wait_for(lambda: worker.state.num_running == 2)
    worker.finish_all()
    assert worker.fresh_state().batch_share == 1.0
    assert worker.stop() == 0
