"""Sampling a batch at once: what the row-by-row way and plain float64 say, and without the host."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ullage_engine.kernels.arena import StepLimits
from ullage_engine.kernels.staging import upload
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import NO_TOKEN, NOTHING_ALLOWED, Chunk, SampledToken
from ullage_engine.runner import logits_edits
from ullage_engine.runner.batched_sampler import CANDIDATES, SORT_ROWS, enqueue, plan_sampling
from ullage_engine.runner.draw import (
    UNSETTLED,
    Row,
    draw_tokens,
    log_masses,
    plan_draws,
    uniform,
)
from ullage_engine.runner.logits_edits import PENALTIES_AT_ONCE, PenaltyCounts
from ullage_engine.runner.sampler import sample
from ullage_engine.runner.warm_up_plans import largest_plans

CPU = torch.device("cpu")

# ------------------------------------------------------------------ a device that is a pretence

VIEWS = {"view", "slice", "select", "expand", "unsqueeze", "squeeze", "alias", "detach"}
"""Operations that launch nothing."""

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "item"}
"""Operations that wait for values of the device."""


class OnDevice(torch.Tensor):
    """A tensor that says it is on another device; its numbers are on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "OnDevice":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            dtype=numbers.dtype,
            device="meta",
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
        )
        tensor.numbers = numbers
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of Device")


def numbers_of(value: Any) -> Any:
    return value.numbers if isinstance(value, OnDevice) else value


def on_device(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


class Device(TorchDispatchMode):
    """Computes what is on the device, counts what it is told, and refuses what would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.uploads = 0
        self.downloads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_there = any(isinstance(each, OnDevice) for each in tensors)
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None:
            kwargs["device"] = CPU
            result = func(*tree_map(numbers_of, args), **kwargs).clone()
            if target == CPU:
                self.downloads += is_there
                return result
            self.uploads += 1
            return OnDevice(result)
        if not is_there:
            return func(*args, **kwargs)

        # A number of the host's that is a tensor would be copied, and waited for.
        assert all(isinstance(each, OnDevice) for each in tensors), f"{name} mixes devices"
        assert name not in HOST_READS, f"{name} waits for the device"
        is_mask = [x.dtype in (torch.bool, torch.uint8) for x in tensors[1:]]
        assert not (name.startswith("index.") and any(is_mask)), f"{name} by a mask waits"
        if name not in VIEWS:
            self.launches[name] += 1
        result = func(*tree_map(numbers_of, args), **tree_map(numbers_of, kwargs))
        return tree_map(on_device, result)


@contextmanager
def counting() -> Iterator[Device]:
    with torch.no_grad(), Device() as device:
        yield device


# ------------------------------------------------------------------ requests


def chunk(index: int, vocab: int, position: int = 9, **fields: Any) -> Chunk:
    limits = {name: fields.pop(name) for name in ("allowed", "banned") if name in fields}
    history = [(7 * index + 3 * step) % vocab for step in range(position)]
    return Chunk(
        request_id=f"r{index}",
        token_ids=history[-1:],
        start=position - 1,
        block_ids=[0],
        sampling=SamplingParams(**fields),
        history=history,
        num_prompt_tokens=position // 2,
        **limits,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("mask", [None, range(0, 300, 2)], ids=["alone", "with a grammar"])
def test_only_allowed_tokens_are_chosen(temperature: float, mask: range | None) -> None:
    vocab = 300
    allowed = (4, 7, 10, 13)
    kept = {token for token in allowed if mask is None or token in mask}
    limits = {} if mask is None else {"allowed": mask_of(mask, vocab)}
    chosen = set()
    for seed in range(20):
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
        some: dict[str, Any] = {"temperature": temperature, "seed": seed, **limits}
        chunks = [chunk(0, vocab, allowed_token_ids=allowed, **some) for _ in range(3)]
        for row in logits[:1]:
            constrained = row.clone()
            logits_edits.constrain(constrained, chunks[0])
            assert set(torch.nonzero(constrained > -torch.inf).flatten().tolist()) == kept
        chosen |= {each.token_id for each in sample(logits, chunks)}
    assert chosen == kept


def mask_of(tokens: Sequence[int], vocab: int) -> bytes:
    bits = np.zeros(vocab, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@st.composite
def sampled_chunks(draw: st.DrawFn, vocab: int, index: int) -> Chunk:
    tokens = st.integers(0, vocab - 1)
    limits: dict[str, Any] = {}
    if draw(st.integers(0, 4)) == 0:
        limits["banned"] = draw(st.lists(tokens, min_size=1, max_size=4, unique=True))
    if draw(st.integers(0, 4)) == 0:
        count = draw(st.sampled_from([1, 8, vocab // 2]))
        limits["allowed"] = mask_of(range(draw(tokens) % (vocab - count), vocab, 1)[:count], vocab)
    if draw(st.integers(0, 4)) == 0:
        limits["logit_bias"] = draw(st.dictionaries(tokens, st.floats(-50, 50), max_size=4))
    if draw(st.integers(0, 4)) == 0:
        some = draw(st.lists(tokens, min_size=1, max_size=40, unique=True))
        limits["allowed_token_ids"] = tuple(sorted(some))
    return chunk(
        index,
        vocab,
        draw(st.integers(1, 40)),
        temperature=draw(st.sampled_from([0.0, 1e-40, 0.3, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 40, 1024, 1025, 5000])),
        top_p=draw(st.sampled_from([1e-9, 0.3, 0.9, 0.9999, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.5, 1e-38])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.2])),
        seed=draw(st.integers(0, 5)),
        top_logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
        **limits,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Chunk]]:
    vocab = draw(st.sampled_from([300, 1500, 3008]))
    rows = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocab, generator=generator) * draw(st.sampled_from([0.1, 2.0, 30.0]))
    # Rounded, there are ties, as real logits have them.
    logits = logits.bfloat16().float()
    for row in range(rows):
        if draw(st.integers(0, 9)) == 0:
            damage = draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0]))
            logits[row, :: draw(st.sampled_from([1, 2, vocab]))] = damage
    return logits, [draw(sampled_chunks(vocab, index)) for index in range(rows)]


def sample_batch(
    logits: torch.Tensor, chunks: Sequence[Chunk], width: int = CANDIDATES
) -> list[SampledToken]:
    plan = plan_sampling(chunks, PenaltyCounts(len(chunks)), logits.shape[1], width)
    return enqueue(logits, logits.clone(), plan).read()


# ------------------------------------------------------------------ one semantics


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_batch_has_the_tokens_of_rows_one_by_one(
    batch: tuple[torch.Tensor, list[Chunk]],
) -> None:
    logits, chunks = batch
    wanted = sample(logits.clone(), chunks)
    given_logits = logits.clone()
    sampled = sample_batch(logits, chunks)
    assert [each.token_id for each in sampled] == [each.token_id for each in wanted]
    assert torch.equal(logits.nan_to_num(), given_logits.nan_to_num())
    for here, there in zip(sampled, wanted, strict=True):
        assert here.logprob == pytest.approx(there.logprob, rel=1e-5, abs=1e-5)
        assert here.top_logprobs == pytest.approx(there.top_logprobs, rel=1e-5, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_a_rows_token_does_not_depend_on_the_batch(
    batch: tuple[torch.Tensor, list[Chunk]],
) -> None:
    logits, chunks = batch
    alone = [sample_batch(logits[[row]], [each])[0] for row, each in enumerate(chunks)]
    assert sample_batch(logits, chunks) == alone


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 2, 40, 1024, 2000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_a_token_is_the_inverse_of_the_filtered_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    vocab = 3008
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    item = chunk(0, vocab, seed=seed, **params)
    assert item.sampling is not None
    row = logits[0].double().numpy()
    [sampled] = sample_batch(logits, [item])

    exponents = (row - row.max()) / temperature
    weights = np.exp(exponents)
    # The exponent is rounded three times and exp once, a sum of weights three times; the last term
    # is what weights lose to fixed point.
    rounding = (weights * (3 * -exponents + 4) * 2**-24).sum() / weights.sum() + vocab * 2**-42
    assert rounding < 4e-6

    order = np.lexsort((np.arange(vocab), -row))
    is_filtered = Row(item.sampling, item.end).is_filtered
    possible = set()
    for shift in (-rounding, 0.0, rounding):
        kept = kept_tokens(weights, order, item.sampling, shift)
        kept = kept if is_filtered else np.sort(kept)
        running = np.cumsum(weights[kept]) / weights[kept].sum()
        noise = uniform(seed, item.end)
        near = np.searchsorted(running, [noise - 2 * rounding, noise, noise + 2 * rounding])
        possible |= set(kept[np.clip(near, 0, len(kept) - 1)].tolist())
    assert sampled.token_id in possible


def kept_tokens(
    weights: np.ndarray, order: np.ndarray, params: SamplingParams, shift: float
) -> np.ndarray:
    """Tokens that the filters keep by their definitions, likeliest first; `shift` moves cuts."""
    order = order[: params.top_k] if params.top_k else order
    running = np.cumsum(weights[order])
    before = (running - weights[order]) / running[-1]
    is_kept = (before < params.top_p + shift) | (params.top_p == 1.0)
    is_kept &= weights[order] >= params.min_p * (1 + shift)
    return order[: max(1, int(is_kept.sum()))]


def test_candidates_say_whether_they_settle_a_row() -> None:
    logits = torch.zeros(4, 400)
    logits[0, 50] = 30.0
    logits[1, :20] = 1.0
    logits[2, :8] = 9.0
    rows = [
        Row(SamplingParams(top_p=0.9, seed=3), 4),
        Row(SamplingParams(top_k=20, seed=3), 4),  # ends with the candidates, but before a tie
        Row(SamplingParams(top_k=9, seed=3), 4),  # ends among equals
        Row(SamplingParams(top_p=0.9, seed=3), 4),  # equals alone
    ]
    for width, expected in ((16, [False, True, True, True]), (32, [False, False, True, True])):
        draws = plan_draws(rows, width)
        tokens = draw_tokens(logits.clone(), draws, upload(draws.arrays, CPU))
        assert (tokens[:, 0] == UNSETTLED).tolist() == expected
    everything = plan_draws(rows, 400)
    tokens = draw_tokens(logits.clone(), everything, upload(everything.arrays, CPU))
    assert tokens[0, 0] == 50
    assert all(0 <= token < 400 for token in tokens[:, 0].tolist())


@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.5}])
def test_a_mask_with_fewer_tokens_than_top_k_keeps_needs_no_second_draw(
    params: dict[str, Any],
) -> None:
    logits = torch.randn(20, 3008, generator=torch.Generator().manual_seed(2))
    chunks = [
        chunk(row, 3008, seed=row, allowed=mask_of(range(7, 8 + row), 3008), **params)
        for row in range(20)
    ]
    wanted = sample_batch(logits, chunks, width=3008)
    plan = plan_sampling(chunks, PenaltyCounts(20), 3008, width=64)
    tokens = enqueue(logits, logits.clone(), plan).result[:, 0].tolist()
    assert tokens == [each.token_id for each in wanted]
    assert all(7 <= token < 8 + row for row, token in enumerate(tokens))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 50}])
def test_a_row_of_which_every_token_is_ruled_out_says_so(params: dict[str, Any]) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    refused: list[dict[str, Any]] = [
        {},
        {"allowed": mask_of([], 300)},
        {"banned": list(range(300))},
        {"allowed": mask_of([8], 300)},
    ]
    chunks = [chunk(row, 300, seed=row, **params, **each) for row, each in enumerate(refused)]
    first, *nothing, last = [each.token_id for each in sample_batch(logits, chunks)]
    assert nothing == [NOTHING_ALLOWED, NOTHING_ALLOWED]
    assert first >= 0
    assert last == 8


def test_a_low_temperature_leaves_fewer_tokens_than_top_k_keeps() -> None:
    logits = torch.randn(20, 3008, generator=torch.Generator().manual_seed(2))
    chunks = [chunk(row, 3008, seed=row, temperature=1e-3, top_k=1024) for row in range(20)]
    wanted = sample_batch(logits, chunks, width=3008)
    plan = plan_sampling(chunks, PenaltyCounts(20), 3008)
    tokens = enqueue(logits, logits.clone(), plan).result[:, 0].tolist()
    assert tokens == [each.token_id for each in wanted]


def test_uniform_logits_keep_exactly_the_share() -> None:
    """Sums of equal weights are exact, so that a share that ends between two tokens does there."""
    logits = torch.zeros(64, 256)
    for top_p, most in ((0.5, 128), (0.25, 64), (0.2500001, 65)):
        chunks = [chunk(i, 256, i + 1, top_p=top_p, seed=i) for i in range(64)]
        tokens = [each.token_id for each in sample_batch(logits, chunks, width=256)]
        assert max(tokens) < most
        assert min(tokens) >= 0


def test_a_masked_token_is_never_drawn_from_a_flat_distribution() -> None:
    logits = torch.zeros(200, 1500)
    logits[:, 700:] = -80.0  # weights that fixed point cuts off
    mask = mask_of([*range(0, 700, 7), *range(701, 1500, 3)], 1500)
    chunks = [chunk(i, 1500, i + 1, seed=i, allowed=mask) for i in range(200)]
    assert {each.token_id % 7 for each in sample_batch(logits, chunks)} == {0}
    assert all(each.token_id < 700 for each in sample_batch(logits, chunks))


def test_log_masses_are_those_of_float64() -> None:
    logits = torch.randn(5, 3001) * 4
    greatest = logits.amax(-1, keepdim=True)
    wanted = torch.logsumexp(logits.double(), -1, keepdim=True) - greatest
    torch.testing.assert_close(log_masses(logits, greatest).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sample_rows", [sample_batch, sample])
def test_alternatives_that_tie_are_in_the_order_of_ids(sample_rows: Any) -> None:
    logits = torch.zeros(2, 1500)
    logits[:, [900, 31, 77]] = 1.0
    logits[:, [1400, 5, 8]] = 0.5
    chunks = [chunk(0, 1500, temperature=0.0, top_logprobs=5), chunk(1, 1500, top_logprobs=1)]
    first, second = sample_rows(logits, chunks)
    assert first.top_ids == [31, 77, 900, 5, 8]
    assert second.top_ids == [31]
    assert first.token_id == 31
    assert first.logprob == first.top_logprobs[0]


def test_penalties_in_pieces_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    chunks = [chunk(i, 300, 40, temperature=0.0, repetition_penalty=1.8) for i in range(6)]
    wanted = sample_batch(logits, chunks)
    assert wanted != sample_batch(logits, [chunk(i, 300, 40, temperature=0.0) for i in range(6)])
    monkeypatch.setattr(logits_edits, "PENALTIES_AT_ONCE", 50)
    assert sample_batch(logits, chunks) == wanted


# ------------------------------------------------------------------ without the host

FILTERED = {"temperature": 0.8, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.1}
ALONE = {"temperature": 0.8, "top_k": 300, "min_p": 0.1, "top_logprobs": 20}
LIMITS = {"allowed": b"\xff" * 256, "banned": [5], "logit_bias": {7: 1.0}}

KINDS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "greedy": ([{"temperature": 0.0}], 6),
    "greedy with log-probabilities": ([{"temperature": 0.0, "top_logprobs": 5}], 35),
    "any token": ([{"temperature": 0.8}], 34),
    "top-k": ([{"temperature": 0.8, "top_k": 50}], 29),
    "top-p": ([FILTERED], 47),
    "top-k, top-p, min-p": ([{**FILTERED, "top_k": 50, "min_p": 0.05}], 40),
    "penalties": ([FILTERED | PENALTIES], 63),
    "masks": ([FILTERED | LIMITS], 56),
    "all": (
        [{"temperature": 0.0}, {"temperature": 1.0}, FILTERED | PENALTIES | LIMITS, ALONE],
        125,
    ),
}
"""Kinds of batches: what rows ask for in turn, and the most operations that a device is told."""


def requests(params: list[dict[str, Any]], rows: int, vocab: int) -> list[Chunk]:
    return [chunk(row, vocab, seed=row, **params[row % len(params)]) for row in range(rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_upload_and_one_download_and_its_launches_do_not_grow(kind: str) -> None:
    params, most = KINDS[kind]
    vocab = 2048
    launches = {}
    for rows in (len(params), 32, 256):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)) * 6
        chunks = requests(params, rows, vocab)
        wanted = sample(logits.clone(), chunks)
        with counting() as device:
            sampled = sample(OnDevice(logits.clone()), chunks, None, None, None, OnDevice(logits))
        assert [each.token_id for each in sampled] == [each.token_id for each in wanted]
        assert device.uploads == (kind not in ("greedy", "greedy with log-probabilities"))
        assert device.downloads == 1
        launches[rows] = device.launches.total()
    assert len(set(launches.values())) == 1, launches
    assert launches[256] <= most, device.launches


def test_nothing_is_read_before_the_tokens() -> None:
    params, _ = KINDS["all"]
    logits = torch.randn(8, 2048) * 6
    with counting() as device:
        plan = plan_sampling(requests(params, 8, 2048), PenaltyCounts(8), 2048)
        batch = enqueue(OnDevice(logits), OnDevice(logits.clone()), plan)
        assert device.downloads == 0
        batch.read()
        assert device.downloads == 1


def test_only_rows_that_candidates_do_not_settle_are_sampled_again() -> None:
    rows = 2 * SORT_ROWS + 3
    vocab = 4096
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    flat = [chunk(row, vocab, temperature=50.0, top_p=0.99, seed=row) for row in range(rows)]
    settled = [chunk(row, vocab, temperature=0.1, top_p=0.5, seed=row) for row in range(rows)]
    for chunks, downloads in (
        (settled, 1),
        ([*settled[:-1], flat[-1]], 2),
        (flat, 4),
    ):
        wanted = sample(logits.clone(), chunks)
        with counting() as device:
            sampled = sample(OnDevice(logits.clone()), chunks)
        assert sampled == wanted
        assert device.downloads == downloads


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero])
def test_the_pretended_device_refuses_to_be_read(read: Any) -> None:
    with counting(), pytest.raises((AssertionError, RuntimeError)):
        read(OnDevice(torch.ones(1)))


def test_the_pretended_device_refuses_numbers_of_the_host() -> None:
    there = OnDevice(torch.ones(3))
    with counting(), pytest.raises(AssertionError, match="mixes devices"):
        torch.where(there > 0, there, 0.0)


# ------------------------------------------------------------------ warm-up


@pytest.mark.parametrize("max_rows", [1, 5, 64])
def test_warm_up_samples_all_that_a_step_can_ask_for(max_rows: int) -> None:
    vocab = 5000
    limits = StepLimits(
        max_tokens=128, max_rows=max_rows, max_model_len=4096, gather_tokens=8192, itemsize=4
    )
    *_, fullest = largest_plans(limits, 1, vocab)
    chunks = fullest.sampled_parts()
    assert len(chunks) == max_rows
    plan = plan_sampling(chunks, PenaltyCounts(max_rows), vocab)
    assert len(plan.edits.arrays["penalised"]) == min(PENALTIES_AT_ONCE, max_rows * 4096)
    assert len(plan.edits.arrays["ruled_out"]) == max_rows + 1
    assert plan.draws.needs_mass
    assert plan.num_alternatives == 20
    logits = torch.randn(max_rows, vocab, generator=torch.Generator().manual_seed(3)) * 20
    result = enqueue(logits, logits.clone(), plan).result
    assert int((result[:, 0] == UNSETTLED).sum()) >= min(max_rows, SORT_ROWS)
    assert all(token.token_id != NO_TOKEN for token in sample_batch(logits, chunks))
