"""A cancelled request has no part in the step after the cancel; the real worker, the real model."""

import os
import signal
from collections.abc import Callable
from typing import Any

from ullage_engine.protocol.messages import Cancel, StepDone
from ullage_engine.protocol.requests import EngineRequest

MakeRequest = Callable[..., EngineRequest]

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]


def read_all(worker: Any) -> list[Any]:
    """Everything the worker has said, until it is silent for a moment."""
    messages = []
    while (message := worker.receive_within(0.2)) is not None:
        messages.append(message)
    return messages


def test_a_cancel_frees_memory_within_one_step(worker: Any, make_request: MakeRequest) -> None:
    stays = worker.submit(make_request("stays", PROMPT, max_tokens=1500))
    worker.wait_for(lambda: bool(stays.token_ids))
    gone = worker.submit(make_request("gone", PROMPT[::-1] * 20, max_tokens=1000))
    worker.wait_for(lambda: len(gone.token_ids) > 3)
    # Stopped, so that it is known which step it was in when the cancel came.
    os.kill(worker.process.pid, signal.SIGSTOP)
    read_all(worker)
    num_tokens = len(gone.token_ids)
    worker.state = None
    worker.send(Cancel(request_id="gone"))
    os.kill(worker.process.pid, signal.SIGCONT)
    worker.wait_for(lambda: worker.state is not None and worker.state.num_running == 1)
    assert len(gone.token_ids) <= num_tokens + 1
    assert worker.state.num_waiting == 0
    worker.send(Cancel(request_id="stays"))
    worker.wait_for(lambda: worker.state.num_running == 0)
    gone.finish = stays.finish = "cancelled"
    freed = worker.state.kv_free_bytes + worker.state.kv_reclaimable_bytes
    assert (freed, worker.state.kv_committed_bytes) == (worker.state.kv_pool_bytes, 0)
    assert not any(isinstance(message, StepDone) for message in read_all(worker))
