"""A worker that serves a small LFM2: its states are in the ledger, its cache changes nothing."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.requests import EngineRequest

MAX_SEQUENCES = 8
CONV_LAYERS = 4
COLUMNS = 2
HEADS = 6
KV_HEADS = 2


def save_lfm2(folder: Path, seed: int, head_dim: int, vocab: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Lfm2Config

        torch.manual_seed(seed)
        config = Lfm2Config(
            vocab_size=vocab,
            hidden_size=HEADS * head_dim,
            num_hidden_layers=CONV_LAYERS + 2,
            layer_types=["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            intermediate_size=80,
            block_multiple_of=16,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return f"file://{folder}"


@pytest.mark.parametrize(
    ("quantization", "head_dim", "vocab"), [("none", 8, 199), ("int8", 32, 208)]
)
def test_states_are_reserved_and_a_cached_prompt_is_answered_alike(
    start_worker: Callable[..., Any],
    make_request: Callable[..., EngineRequest],
    tmp_path: Path,
    quantization: str,
    head_dim: int,
    vocab: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By torch, and in small numbers by the C++ library."""
    seed = 20_261
    worker = start_worker(
        model={
            "source": save_lfm2(tmp_path, seed, head_dim, vocab),
            "quantization": quantization,
            "dtype": "float32",
            "deterministic": True,
            "max_model_len": 512,
        },
        memory={"max_kv": 4 << 20},
        batching={"max_sequences": MAX_SEQUENCES, "prefill_chunk_tokens": 16},
    )
    prompt = [random.Random(seed).randrange(vocab) for _ in range(70)]
    answers = []
    for number in range(3):
        answers.append(worker.submit(make_request(f"r{number}", prompt, max_tokens=20)))
        worker.finish_all()
    state = worker.fresh_state()
    assert len(answers[0].token_ids) == 20, f"seed {seed}"
    assert all(each.token_ids == answers[0].token_ids for each in answers), f"seed {seed}"
    assert state.prefix_hit_tokens == 2 * 64
    states = 2 * MAX_SEQUENCES * CONV_LAYERS * COLUMNS * HEADS * head_dim * 4
    entries = {entry.name: entry for entry in state.ledger}
    kv_bytes_per_token = 2 * 2 * KV_HEADS * head_dim * 4  # of two layers
    pool = entries["state_pool"]
    assert pool.reserved_bytes == pool.allocated_bytes == states + 16 * kv_bytes_per_token
    assert entries["kv_pool"].allocated_bytes == state.kv_pool_bytes
    assert worker.stop() == 0
    computes = quantization != "none" and instruction_set() is not None
    assert ("the C++ library computes steps" in capfd.readouterr().err) == computes
