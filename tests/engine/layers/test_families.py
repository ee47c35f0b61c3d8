"""Logits of a small random model of every family against transformers, however they are computed.

Weights and tokens differ from run to run; a failure prints their seed.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import KVPool, StatePool, allocate
from ullage_engine.layers.attention import DefaultBackend
from ullage_engine.layers.decoder import Decoder, Weights
from ullage_engine.layers.moe import expert_linears
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan

Load = Callable[..., LoadedModel]

VOCAB = 199
LIMITS = StepLimits(
    max_tokens=320,
    max_rows=16,
    max_model_len=512,
    gather_tokens=1024,
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
    model_config: ModelConfig

    def logits(self, *chunks: Chunk) -> torch.Tensor:
        """Of the last token of each chunk, [chunks, vocab]."""
        plan = StepPlan(list(chunks))
        batch = build_batch(
            plan,
            16,
            LIMITS.context_blocks,
            conv_kernel=self.model_config.conv_kernel,
            scratch_block=self.pool.scratch_block,
        )
        out = torch.empty(LIMITS.product_rows(len(chunks)), VOCAB)
        with torch.inference_mode():
            hidden = self.decoder.forward(batch, self.pool.layers, self.states.layers)
            self.decoder.logits(hidden, out)
        return out[: len(chunks)]

    def expected(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0, -1]
        return logits


def chunk(tokens: list[int], start: int, end: int, slot: int = 0, replayed: int = 0) -> Chunk:
    """Tokens start to end of a sequence that has blocks and states of its own.

    Its states alternate between two slots, which is by the number of tokens here.
    """
    first = start - replayed
    return Chunk(
        request_id=str(slot),
        token_ids=tokens[first:end],
        start=first,
        block_ids=list(range(slot, 32 * 16, 16))[: -(-end // 16)],
        sampling=ANY,
        history=tokens,
        num_prompt_tokens=len(tokens),
        num_replayed=replayed,
        state_slot=slot if first and not replayed else None,
        next_state_slot=slot,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


LENGTHS = [300, 2, 3, 17, 40, 150, 220]
"""Of the sequences of a seed."""


@pytest.fixture(scope="module", params=["llama", "qwen3", "lfm2", "lfm2_moe", "gpt_oss"])
def saved(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Callable[[str, int], Any],
) -> tuple[Any, Path, int]:
    """transformers' model, the folder it was saved to, and the seed of both it and its tokens."""
    for seed in itertools.count(20_261):
        model = random_model(request.param, seed)
        if routing_margin(model, seed) > 1e-5:
            break
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder, seed


def routing_margin(model: Any, seed: int) -> float:
    """How much the last expert chosen leads the first one not chosen, at the least.

    Rounding may decide between equals, here and in transformers; such weights test nothing.
    """
    margins = [1.0]

    def observe(module: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        scores = outputs[0]
        if len(inputs) > 1 and inputs[1] is not None:
            scores = scores.sigmoid() + inputs[1]
        ordered = scores.sort(descending=True).values
        margins.append(float((ordered[:, 2] - ordered[:, 3]).min()))

    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    hooks = [each.register_forward_hook(observe) for each in routers]
    with torch.inference_mode():
        for slot, length in enumerate(LENGTHS):
            model(torch.tensor([make_tokens(seed + slot, length)]))
    for hook in hooks:
        hook.remove()
    return min(margins)


@pytest.fixture
def seed(saved: tuple[Any, Path, int]) -> int:
    return saved[2]


@pytest.fixture
def model(saved: tuple[Any, Path, int], load: Load) -> Model:
    theirs, folder, _ = saved
    loaded = load(f"file://{folder}")
    model_config = loaded.model_config
    cpu = torch.device("cpu")
    with torch.inference_mode():
        arena = allocate(step_arena(model_config, LIMITS), torch.float32, cpu)
        backend = DefaultBackend(model_config, LIMITS, arena)
        tensors = loaded.tensors
        weights = Weights(
            tensors,
            linear=lambda name: backend.linear(tensors[name]),
            experts=lambda name: expert_linears(tensors[name], backend.linear, False),
        )
        decoder = Decoder(weights, model_config, LIMITS, arena, backend)
        pool = KVPool(model_config, 32 * 16, 16, torch.float32, cpu)
        states = StatePool(model_config, 32, torch.float32, cpu)
    return Model(decoder, pool, states, theirs, model_config)


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
    sequences = [make_tokens(seed + slot, length) for slot, length in enumerate([1, *LENGTHS[1:]])]
    chunks: Sequence[Chunk] = [
        chunk(tokens, max(0, len(tokens) - 1 - 5 * (slot % 2)), len(tokens), slot)
        for slot, tokens in enumerate(sequences)
    ]
    for each, tokens in zip(chunks, sequences, strict=True):
        if each.start:
            model.logits(chunk(tokens, 0, each.start, each.next_state_slot))
    together = model.logits(*chunks)
    for logits, tokens in zip(together, sequences, strict=True):
        assert_close(logits, model.expected(tokens))


@pytest.mark.parametrize("start", [3, 16, 64, 149])
def test_replayed_tokens_rebuild_the_state_and_keep_their_kv(
    model: Model, seed: int, start: int
) -> None:
    """A prefix whose KV is cached and whose convolution state is not."""
    tokens = make_tokens(seed, 150)
    model.logits(chunk(tokens, 0, start))
    with torch.inference_mode():
        model.states.states.fill_(9.0)
    kept = model.pool.blocks[:, : model.pool.num_blocks].clone()
    replayed = min(start, model.model_config.replay_tokens)
    assert_close(
        model.logits(chunk(tokens, start, 150, replayed=replayed))[0], model.expected(tokens)
    )
    whole = start // 16
    blocks = list(range(0, 32 * 16, 16))[:whole]
    assert torch.equal(model.pool.blocks[:, blocks], kept[:, blocks])
