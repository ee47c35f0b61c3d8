"""Choosing tokens: against plain formulas, and the same in any company."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_engine.native.library import Team, instruction_set
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import NO_TOKEN, NOTHING_ALLOWED, Chunk
from ullage_engine.runner import sampler
from ullage_engine.runner.draw import Row, likeliest, uniform
from ullage_engine.runner.logits_edits import PenaltyCounts, TokenCounts, penalise
from ullage_engine.runner.sampler import choose, sample

VOCAB = 3008
TEAMS = {"torch": None} | ({"library": Team(2)} if instruction_set() else {})

by_either = pytest.mark.parametrize("team", TEAMS.values(), ids=TEAMS)
"""Runs a test with torch and, where the processor can, with the C++ library."""


def chunk(history: list[int], num_prompt_tokens: int = 1, **params: Any) -> Chunk:
    return Chunk(
        request_id="r",
        token_ids=history[-1:],
        start=len(history) - 1,
        block_ids=[0],
        sampling=SamplingParams(**params),
        history=history,
        num_prompt_tokens=num_prompt_tokens,
    )


def random_logits(seed: int, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    torch.manual_seed(seed)
    # bfloat16 makes ties, as real logits have them.
    return (torch.randn(rows, VOCAB) * scale).bfloat16().float()


def draw(logits: torch.Tensor, item: Chunk, team: Team | None = None) -> int:
    return sample(logits.clone(), [item], team=team)[0].token_id


def naive_kept(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that the filters keep, likeliest first, by their definitions in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[: params.top_k] if params.top_k else order
    weights = np.exp(scaled[order] - scaled[order[0]])
    probabilities = weights / weights.sum()
    kept = []
    mass = 0.0
    for token, weight, probability in zip(order, weights, probabilities, strict=True):
        if kept and (mass >= params.top_p or weight < params.min_p):
            break
        kept.append(token)
        mass += probability
    return kept


@by_either
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    position=st.integers(1, 500),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 1, 2, 40, 500, 2999, 5000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
# The nucleus of what top-k keeps fits the candidates first tried, and top-k does not.
@example(seed=0, position=1, temperature=1.0, top_k=500, top_p=0.5, min_p=0.0)
def test_the_token_is_the_naive_inverse_of_the_filtered_distribution(
    team: Team | None,
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = random_logits(seed, scale=2.0)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    token = draw(logits, chunk([3] * position, **_fields(params)), team)
    row = logits[0].numpy()
    kept = naive_kept(row, params)
    filtered = top_k > 0 or top_p < 1.0 or min_p > 0.0
    order = kept if filtered else sorted(kept)
    assert token in near_tokens(row, order, temperature, uniform(seed, position))


def near_tokens(row: np.ndarray, order: list[int], temperature: float, noise: float) -> set[int]:
    """Tokens of the distribution at the noise; float32 sums may step over a boundary this near."""
    weights = np.exp((row[order].astype(np.float64) - row.max()) / temperature)
    running = np.cumsum(weights) / weights.sum()
    return {
        order[min(int(np.searchsorted(running, noise + shift)), len(order) - 1)]
        for shift in (-1e-4, 0.0, 1e-4)
    }


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@by_either
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.floats(0.1, 5.0))
def test_top_k_1_is_greedy_and_both_take_the_first_of_ties(
    team: Team | None, seed: int, temperature: float
) -> None:
    logits = random_logits(seed)
    expected = int(np.argmax(logits[0].numpy()))
    assert draw(logits, chunk([1], temperature=0.0), team) == expected
    assert draw(logits, chunk([1], temperature=temperature, top_k=1), team) == expected
    assert draw(logits, chunk([1], temperature=temperature, top_p=1e-9), team) == expected


@by_either
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_rows_token_does_not_depend_on_its_company(
    team: Team | None, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(2, 20))
    logits = random_logits(data.draw(st.integers(0, 100)), rows, scale=1.0)
    items = [
        chunk(
            list(range(1, 2 + index)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_p=data.draw(st.sampled_from([0.3, 0.9, 0.9999, 1.0])),
            top_k=data.draw(st.sampled_from([0, 5, 200])),
            min_p=data.draw(st.sampled_from([0.0, 0.2])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            seed=data.draw(st.integers(0, 3)),
        )
        for index in range(rows)
    ]
    together = [token.token_id for token in sample(logits.clone(), items, team=team)]
    alone = [draw(logits[index : index + 1], item, team) for index, item in enumerate(items)]
    assert together == alone


@by_either
def test_frequencies_follow_the_distribution(team: Team | None) -> None:
    logits = torch.full((1, 16), -90.0)
    logits[0, :4] = torch.tensor([0.0, 1.0, 2.0, -1.0])
    items = [chunk([0] * position, temperature=1.0, seed=9) for position in range(1, 4001)]
    rows = logits.expand(4000, -1).clone()
    drawn = Counter(token.token_id for token in sample(rows, items, team=team))
    for token, probability in enumerate(logits[0].softmax(-1).tolist()):
        assert drawn[token] / 4000 == pytest.approx(probability, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(
    history=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    prompt=st.integers(0, 60),
    repetition=st.sampled_from([1.0, 0.8, 1.5]),
    presence=st.sampled_from([0.0, 0.7, -0.4]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
)
def test_penalties_are_the_naive_formula(
    history: list[int], prompt: int, repetition: float, presence: float, frequency: float
) -> None:
    logits = random_logits(len(history))[0, :50].clone()
    expected = logits.tolist()
    for token in set(history):
        value = expected[token]
        expected[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(history[prompt:]).items():
        expected[token] -= presence + frequency * count
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    penalise(logits, params, TokenCounts(history, prompt))
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)


class ReadList(list[int]):
    """A list that counts how often an element is read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_each_token_of_a_history_is_counted_once_over_all_steps() -> None:
    history = ReadList([5, 9, 5])
    counts = PenaltyCounts(4)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.0}
    for step in range(40):
        item = replace(chunk([1], num_prompt_tokens=2, **params), history=history)
        fresh = replace(item, history=list(history))
        logits = random_logits(step)
        (kept,), (recounted,) = sample(logits.clone(), [item], counts), sample(logits, [fresh])
        assert kept.token_id == recounted.token_id
        history.append(kept.token_id)
    assert history.num_read == 42


def test_a_request_of_the_same_name_is_counted_anew() -> None:
    counts = PenaltyCounts(4)
    params = {"repetition_penalty": 1e6, "temperature": 0.0}
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 2.0
    logits[0, 9] = 1.0
    first = replace(chunk([1], **params), history=[5])
    assert sample(logits.clone(), [first], counts)[0].token_id == 9
    second = replace(first, history=[7])
    assert sample(logits.clone(), [second], counts)[0].token_id == 5


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(4)
    item = chunk([5, 6], temperature=0.3, repetition_penalty=2.0, top_logprobs=3, seed=1)
    [sampled] = sample(logits.clone(), [item])
    raw = logits[0].log_softmax(-1)
    assert sampled.logprob == pytest.approx(raw[sampled.token_id].item())
    assert sampled.top_logprobs == pytest.approx(raw.topk(3).values.tolist())
    assert [raw[i].item() for i in sampled.top_ids] == pytest.approx(sampled.top_logprobs)


def test_no_logprobs_unless_asked() -> None:
    logits = random_logits(4, 2)
    plain, asked = sample(logits, [chunk([1]), chunk([1], top_logprobs=0)])
    assert (plain.logprob, plain.top_ids, plain.top_logprobs) == (0.0, [], [])
    assert asked.logprob < 0.0
    assert asked.top_ids == []


@pytest.mark.parametrize("width", [1, 128, 1024])
def test_likeliest_sorts_ties_by_id(width: int) -> None:
    logits = (random_logits(2, 3) * 4).round() / 4
    values, ids = likeliest(logits, width)
    everything, _ = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, everything[:, :width])
    for row in range(3):
        pairs = list(zip((-values[row]).tolist(), ids[row].tolist(), strict=True))
        assert pairs == sorted(pairs)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_noise_is_inside_the_unit_interval_in_float32(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 < np.float32(value) < 1.0
    assert float(np.float32(value)) == value
    assert uniform(seed, position) == value


def test_noise_is_even_and_uncorrelated() -> None:
    values = np.array([[uniform(seed, p) for p in range(200)] for seed in range(50)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.std() - math.sqrt(1 / 12)) < 0.01
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.04


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1e-60},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1},
]


@by_either
def test_a_token_is_in_the_vocabulary_whatever_finite_logits_are(
    team: Team | None, subtests: pytest.Subtests
) -> None:
    for value, share, params in product((3e38, -3e38), (1, 2, VOCAB), PARAMS):
        logits = random_logits(4)
        logits[0, ::share] = value
        for penalty in (0.01, 1.0, 100.0, 1e-38):
            item = chunk([6, 7, 8], seed=5, repetition_penalty=penalty, top_logprobs=2, **params)
            with subtests.test(value=value, share=share, params=params, penalty=penalty):
                (sampled,) = sample(logits.clone(), [item], team=team)
                assert 0 <= sampled.token_id < VOCAB
                assert not math.isnan(sampled.logprob)


@by_either
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_one_logit_that_is_not_finite_has_no_token_and_its_neighbours_have(
    value: float, team: Team | None, subtests: pytest.Subtests
) -> None:
    logits = random_logits(4, rows=3)
    for params in PARAMS:
        rows = [chunk([6, 7, 8], seed=seed, top_logprobs=2, **params) for seed in (5, 6, 7)]
        wanted = [each.token_id for each in sample(logits.clone(), rows, team=team)]
        damaged = logits.clone()
        damaged[1, 777] = value
        with subtests.test(params=params):
            tokens = [each.token_id for each in sample(damaged, rows, team=team)]
            assert tokens == [wanted[0], NO_TOKEN, wanted[2]]


@by_either
def test_a_row_of_which_every_token_is_ruled_out_says_so_and_its_neighbours_have_one(
    team: Team | None, subtests: pytest.Subtests
) -> None:
    nothing = bytes(-(-VOCAB // 8))
    for params in PARAMS:
        rows = [chunk([6, 7, 8], seed=seed, top_logprobs=2, **params) for seed in (5, 6, 7)]
        logits = random_logits(4, rows=3)
        wanted = [each.token_id for each in sample(logits.clone(), rows, team=team)]
        for refused in ({"allowed": nothing}, {"banned": list(range(VOCAB))}):
            rows[1] = replace(rows[1], **refused)
            with subtests.test(params=params, refused=list(refused)):
                tokens = [each.token_id for each in sample(logits.clone(), rows, team=team)]
                assert tokens == [wanted[0], NOTHING_ALLOWED, wanted[2]]


@by_either
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_allowed=st.sampled_from([1, 2, 7, 300]),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 40, 500, 2999, 5000]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_filters_keep_of_what_a_mask_allows(
    team: Team | None,
    seed: int,
    num_allowed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = random_logits(seed, scale=2.0)
    allowed = np.random.default_rng(seed).permutation(VOCAB)[:num_allowed]
    bits = np.zeros(-(-VOCAB // 8) * 8, np.uint8)
    bits[allowed] = 1
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    item = replace(
        chunk([3], **_fields(params)), allowed=np.packbits(bits, bitorder="little").tobytes()
    )
    token = draw(logits, item, team)

    masked = np.full(VOCAB, -np.inf, np.float32)
    masked[allowed] = logits[0].numpy()[allowed]
    kept = [each for each in naive_kept(masked, params) if masked[each] > -np.inf]
    is_filtered = top_k > 0 or top_p < 1.0 or min_p > 0.0
    order = kept if is_filtered else sorted(kept)
    assert token in near_tokens(masked, order, temperature, uniform(seed, 1))


def test_the_library_leaves_no_row_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of which a mask allows fewer tokens than top-k keeps, nor one of a flat
    distribution, of which more tokens are kept than the library has room for beforehand."""
    if TEAMS.get("library") is None:
        pytest.skip("the library cannot be used here")
    monkeypatch.setattr(sampler, "_choose_with_torch", None)
    few = torch.full((1, VOCAB), -math.inf)
    few[0, [5, 900, 2000]] = torch.tensor([0.0, 1.0, -30.0])
    flat = torch.zeros(1, VOCAB)
    for top_k, top_p in ((40, 1.0), (2999, 1.0), (0, 0.99), (2500, 0.99)):
        row = Row(SamplingParams(top_k=top_k, top_p=top_p, seed=3), 5)
        assert choose(few.clone(), [row], TEAMS["library"])[0] in (5, 900)
        assert 0 <= choose(flat.clone(), [row], TEAMS["library"])[0] < VOCAB
