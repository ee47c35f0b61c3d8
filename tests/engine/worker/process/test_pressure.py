"""Memory pressure in the real worker, and a bound from the server: the batch shrinks, and comes
back."""

from collections.abc import Callable
from typing import Any

from ullage_engine.protocol.messages import Cancel, LimitBatch
from ullage_engine.protocol.requests import EngineRequest

BLOCK_BYTES = 16 * 23_040
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]


def cancel(worker: Any, requests: list[EngineRequest]) -> None:
    for request in requests:
        worker.send(Cancel(request_id=request.request_id))


def test_a_pressure_event(
    start_worker: Callable[..., Any], make_request: Callable[..., EngineRequest]
) -> None:
    """Six early requests are promised more than 0.3 of the pool.

    They go on until they are cancelled, so all of them run whenever the late ones come.
    """
    worker = start_worker(
        model={"dtype": "bfloat16", "max_model_len": 512},
        memory={"max_kv": 256 * BLOCK_BYTES},
        degrade={
            "hysteresis_percent": 10,
            "pressure_levels": [{"below_percent": 70, "batch_percent": 25}],
        },
    )
    assert worker.state.pressure_level == 0
    early = [make_request(f"early-{i}", PROMPT, max_tokens=480) for i in range(6)]
    worker.submit_group(early)
    worker.wait_for(lambda: worker.state.pressure_level == 1)
    late = worker.submit_group([make_request(f"late-{i}", PROMPT, max_tokens=16) for i in range(3)])
    worker.wait_for(lambda: worker.state.num_running + worker.state.num_waiting == 9)
    # A quarter of the batch of eight: those that run go on, and none starts beside them.
    assert (worker.state.num_running, worker.state.num_waiting) == (6, 3)
    cancel(worker, early)
    worker.wait_for(lambda: all(answer.is_over for answer in late))
    assert [(answer.finish, len(answer.token_ids)) for answer in late] == [("length", 16)] * 3
    assert worker.fresh_state().pressure_level == 0

    worker.send(LimitBatch(share=0.125))
    worker.wait_for(lambda: worker.state.batch_share == worker.state.batch_limit == 0.125)
    hot = [make_request(f"hot-{i}", PROMPT, max_tokens=480) for i in range(2)]
    worker.submit_group(hot)
    worker.wait_for(lambda: worker.state.num_running + worker.state.num_waiting == 2)
    assert (worker.state.num_running, worker.state.num_waiting) == (1, 1)
    worker.send(LimitBatch(share=1.0))
    worker.wait_for(lambda: worker.state.num_running == 2)
    cancel(worker, hot)
    assert worker.fresh_state().batch_share == 1.0
    assert worker.stop() == 0
