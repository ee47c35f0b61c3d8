"""After memory ran out the next start takes less, and counts what no worker could report."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ullage_engine.memory.out_of_memory import OutOfMemoryFault
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.vllm_worker import startup

BLOCK = 32
BLOCK_BYTES = 2 * BLOCK * 32 * 4
"""Keys and values of one layer, one head of 32 numbers, 4 bytes each."""
NUM_BLOCKS = 48
"""Blocks of the pool, with the one that is never given out."""
LONGEST = 1024
PROMPT = [7 * number % 1000 + 100 for number in range(300)]


@pytest.fixture(scope="module")
def checkpoint(write_checkpoint: Any) -> Path:
    return write_checkpoint(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=1,
            head_dim=32,
            max_position_embeddings=2048,
        )
    )


@pytest.fixture
def start(start_here: Any, checkpoint: Path) -> Any:
    """Starts the engine, as the next worker of one server does."""

    def start_one() -> Any:
        return start_here(
            checkpoint,
            memory={"max_kv": NUM_BLOCKS * BLOCK_BYTES},
            batching={"max_sequences": 8, "prefill_chunk_tokens": 256},
        )

    return start_one


def steps_to_first_token(started: Any, name: str) -> int:
    """Returns the steps that a prompt takes."""
    engine = started.engine
    request = EngineRequest(
        request_id=name,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        max_tokens=4,
        sampling=SamplingParams(temperature=0.0),
        cache_salt=name,
    )
    assert engine.submit_group([request]) == []
    num_before = engine.num_steps
    while not engine.step():
        pass
    num_steps = engine.num_steps - num_before
    while engine.has_work:
        engine.step()
    return int(num_steps)


def run_out(started: Any) -> None:
    """Makes memory run out in the next step, which ends a worker."""
    started.engine.inject_out_of_memory(0)
    with pytest.raises(OutOfMemoryFault):
        started.engine.step()


def facts(started: Any) -> tuple[int, int, int]:
    """Returns the blocks of the pool, the bytes kept free, and the prompt tokens of a step."""
    reserved = {each.name: each.reserved_bytes for each in started.ledger.states()}
    num_blocks = started.core.pool_bytes // BLOCK_BYTES
    return num_blocks, reserved["safety_reserve"], started.core.chunk_tokens


def test_each_start_after_memory_ran_out_takes_less(start: Any) -> None:
    started = start()
    assert facts(started) == (NUM_BLOCKS, 0, 256)
    assert steps_to_first_token(started, "first") == 2
    run_out(started)

    started = start()
    assert facts(started) == (42, 6 * BLOCK_BYTES, 128)
    # What decodes of other requests would take is given to the prompt.
    assert steps_to_first_token(started, "second") == 3
    # The worker before has reported the step that ended it.
    assert started.state().num_oom_events == 0
    run_out(started)

    started = start()
    assert facts(started)[0] == 36
    run_out(started)

    started = start()
    num_blocks, kept_free, chunk_tokens = facts(started)
    # As many as the longest request needs, and the one that is never given out.
    assert num_blocks == LONGEST // BLOCK + 1
    # A part of a block is of no use to the pool.
    num_less = NUM_BLOCKS - num_blocks
    assert (num_less - 1) * BLOCK_BYTES < kept_free <= num_less * BLOCK_BYTES
    assert chunk_tokens == 64


def test_a_start_that_ran_out_of_memory_is_counted_by_the_next(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(startup, "_load", load)
        with pytest.raises(MemoryError):
            start()
    assert start().state().num_oom_events == 1
    assert start().state().num_oom_events == 0
