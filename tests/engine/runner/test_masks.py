"""Biases and masks: what they leave is sampled as if there were nothing else."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk
from ullage_engine.runner.logits_edits import constrain
from ullage_engine.runner.sampler import sample

VOCAB = 1500


def chunk(position: int, **fields: Any) -> Chunk:
    limits = {name: fields.pop(name) for name in ("allowed", "banned") if name in fields}
    history = [3] * position
    sampling = SamplingParams(**fields)
    return Chunk("r", history[-1:], position - 1, [0], sampling, history, 1, **limits)


def mask_of(tokens: list[int]) -> bytes:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def random_logits(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, VOCAB) * 3


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 200]),
    top_p=st.sampled_from([0.3, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_a_mask_leaves_the_distribution_over_what_it_allows(
    seed: int,
    tokens: set[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    allowed = sorted(tokens)
    logits = random_logits(seed)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    masked = chunk(9, allowed=mask_of(allowed), seed=seed, **params)
    token = sample(logits.clone(), [masked])[0].token_id
    few = sample(logits[:, allowed].clone(), [chunk(9, seed=seed, **params)])[0].token_id
    assert token == allowed[few]


def test_masks_keep_to_their_rows() -> None:
    logits = torch.cat([random_logits(1)] * 3)
    free = chunk(4, temperature=0.0)
    rows = [free, chunk(4, temperature=0.0, allowed=mask_of([7])), free]
    first, masked, last = (each.token_id for each in sample(logits, rows))
    assert first == last != 7
    assert masked == 7


def test_a_mask_shorter_than_the_vocabulary_allows_nothing_beyond() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    assert sample(logits, [chunk(4, temperature=0.0, allowed=b"\xff")])[0].token_id == 7


def test_banned_tokens_are_not_chosen_and_biases_add_up() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 3.0
    greedy = {"temperature": 0.0}
    assert sample(logits.clone(), [chunk(4, **greedy, banned=[5, 0])])[0].token_id == 1
    bias = {5: -3.5, 9: 2.0, 10: 1.0}
    assert sample(logits.clone(), [chunk(4, **greedy, logit_bias=bias)])[0].token_id == 9
    assert sample(logits.clone(), [chunk(4, **greedy, logit_bias={9: 2.0})])[0].token_id == 5
    both = chunk(4, **greedy, logit_bias={9: 100.0}, allowed=mask_of([5, 6]))
    assert sample(logits.clone(), [both])[0].token_id == 5


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(3)
    wanted = torch.log_softmax(logits[0], -1)
    item = chunk(4, temperature=2.0, top_logprobs=2, allowed=mask_of([8]), logit_bias={8: -50.0})
    sampled = sample(logits.clone(), [item])[0]
    assert sampled.token_id == 8
    assert sampled.logprob == pytest.approx(float(wanted[8]))
    assert sampled.top_ids == wanted.topk(2).indices.tolist()


@given(st.integers(1, 300), st.randoms(use_true_random=False), st.sampled_from([0.02, 0.5, 0.98]))
def test_masks_of_few_and_of_nearly_all_tokens_rule_out_alike(
    vocab: int, rng: random.Random, share: float
) -> None:
    num_named = max(1, vocab + rng.choice([-9, 0, 0, 40]))
    allowed = [rng.random() < share for _ in range(num_named)]
    mask = np.packbits(np.array(allowed, bool), bitorder="little").tobytes()
    logits = torch.arange(1.0, vocab + 1)
    constrain(logits, masked_chunk(mask))
    # Bits behind the vocabulary mean nothing; what a shorter mask does not name is ruled out.
    is_allowed = [index < len(allowed) and allowed[index] for index in range(vocab)]
    wanted = [index + 1.0 if fine else -math.inf for index, fine in enumerate(is_allowed)]
    assert logits.tolist() == wanted


def masked_chunk(mask: bytes) -> Chunk:
    return Chunk("a", [0], 0, [0], SamplingParams(), [], 1, allowed=mask)
