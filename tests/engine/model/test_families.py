"""Logits of a small random model of every family against transformers, however they are computed.

Weights and tokens differ from run to run; a failure prints their seed.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.core.batch import build_batch
from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.core.request import SamplingParams
from ullage_engine.kernels.buffers import allocate
from ullage_engine.kernels.pool import KVPool, StatePool
from ullage_engine.layers.compute import FastCompute
from ullage_engine.memory.arena import StepLimits, gather_tokens, step_arena
from ullage_engine.models.decoder import Decoder, Weights
from ullage_engine.weights.store import LoadedModel

Load = Callable[..., LoadedModel]

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
CONV_FIRST = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3, "head_dim": 16, "tie_word_embeddings": True},
    "lfm2": {"num_hidden_layers": 6, "layer_types": CONV_FIRST, "block_multiple_of": 16},
}
LIMITS = StepLimits(
    max_tokens=320,
    max_rows=16,
    max_model_len=512,
    max_gather_tokens=gather_tokens(512, 1024, 16),
    block_tokens=16,
    itemsize=4,
)
ANY = SamplingParams(temperature=0.0)


@dataclass
class Model:
    """One set of weights, computed here and by transformers."""

    decoder: Decoder
    pool: KVPool
    states: StatePool
    theirs: Any
    conv_kernel: int

    def logits(self, *chunks: Chunk) -> torch.Tensor:
        """Of the last token of each chunk, [chunks, vocab]."""
        plan = StepPlan(list(chunks))
        batch = build_batch(
            plan, 16, LIMITS.max_gather_tokens, LIMITS.context_blocks, self.conv_kernel
        )
        out = torch.empty(LIMITS.product_rows(len(chunks)), VOCAB)
        with torch.inference_mode():
            hidden = self.decoder.forward(batch, self.pool.layers, self.states.layers)
            self.decoder.logits(hidden, batch.sampled_rows, out)
        return out[: len(chunks)]

    def expected(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0, -1]
        return logits


def chunk(tokens: list[int], start: int, end: int, slot: int = 0, replayed: int = 0) -> Chunk:
    """Tokens start to end of a sequence that has blocks of its own."""
    first = start - replayed
    return Chunk(
        request_id=str(slot),
        token_ids=tokens[first:end],
        start=first,
        block_ids=list(range(slot, 32 * 16, 16))[: -(-end // 16)],
        sampling=ANY,
        history=tokens,
        num_prompt_tokens=len(tokens),
        state_slot=slot,
        num_replayed=replayed,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def seed() -> int:
    value = random.SystemRandom().randrange(1 << 31)
    print(f"seed {value}")
    return value


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> tuple[Any, Path]:
    """transformers' model, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        config = CONFIG_MAPPING[request.param](**(COMMON | FAMILIES[request.param]))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().float()
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" in name or "sinks" in name:
                    value.uniform_(0.5, 1.5)
        model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def model(saved: tuple[Any, Path], load: Load) -> Model:
    theirs, folder = saved
    loaded = load(f"file://{folder}")
    geometry, cpu = loaded.geometry, torch.device("cpu")
    with torch.inference_mode():
        arena = allocate(step_arena(geometry, LIMITS), torch.float32, cpu)
        compute = FastCompute(geometry, LIMITS, arena)
        tensors = loaded.tensors
        weights = Weights(tensors, lambda name: compute.matrix(tensors[name]))
        decoder = Decoder(weights, geometry, LIMITS, arena, compute)
        pool = KVPool(geometry, 32 * 16, 16, torch.float32, cpu)
        states = StatePool(geometry, 16, torch.float32, cpu)
    return Model(decoder, pool, states, theirs, geometry.conv_kernel)


def make_tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 16, 33, 300])
def test_a_whole_prompt(model: Model, seed: int, length: int) -> None:
    tokens = make_tokens(seed, length)
    assert_close(model.logits(chunk(tokens, 0, length))[0], model.expected(tokens))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 100])
def test_a_prompt_in_chunks_of_any_size(model: Model, seed: int, size: int) -> None:
    tokens = make_tokens(seed, 150)
    first = 130 if size == 1 else 0
    if first:
        model.logits(chunk(tokens, 0, first))
    for start in range(first, 150, size):
        end = min(150, start + size)
        last = model.logits(chunk(tokens, start, end))
    assert_close(last[0], model.expected(tokens))


def test_decodes_and_prompts_of_any_length_together(model: Model, seed: int) -> None:
    lengths = [1, 2, 3, 17, 40, 150, 220]
    sequences = [make_tokens(seed + slot, length) for slot, length in enumerate(lengths)]
    chunks: Sequence[Chunk] = [
        chunk(tokens, max(0, len(tokens) - 1 - 5 * (slot % 2)), len(tokens), slot)
        for slot, tokens in enumerate(sequences)
    ]
    for each, tokens in zip(chunks, sequences, strict=True):
        if each.start:
            model.logits(chunk(tokens, 0, each.start, each.state_slot))
    together = model.logits(*chunks)
    for logits, tokens in zip(together, sequences, strict=True):
        assert_close(logits, model.expected(tokens))
