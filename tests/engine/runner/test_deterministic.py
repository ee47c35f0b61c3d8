"""With `deterministic` a token's logits are a function of its context, to the last bit."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from ullage_testing.small_models import DTYPES

from ullage_engine.kernels.deterministic import RowProducts
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

LENGTH = 600
NUM_BLOCKS = 256
EVERY_LOGPROB = SamplingParams(temperature=0.0, top_logprobs=49_152)
SOME_LOGPROBS = SamplingParams(temperature=0.0, top_logprobs=200)
LENGTHS_BESIDE = [1, 2, 17, 40, 5, 31, 256, 257, 160, 16, 5, 9, 30, 48, 7]

Logprobs = tuple[list[int], list[float]]


class Sequences:
    """Random prompts in blocks of their own, computed by one runner in any parts."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        generator = random.Random(5)
        lengths = [LENGTH, *LENGTHS_BESIDE]
        self.tokens = [[generator.randrange(20, 49_000) for _ in range(n)] for n in lengths]
        free = list(range(NUM_BLOCKS))
        generator.shuffle(free)
        self._blocks = [[free.pop() for _ in range(-(-n // 16))] for n in lengths]

    def chunk(self, index: int, start: int, end: int) -> Chunk:
        tokens = self.tokens[index][:end]
        is_last = end == len(self.tokens[index])
        sampling = SOME_LOGPROBS if index else EVERY_LOGPROB
        return Chunk(
            request_id=str(index),
            token_ids=tokens[start:],
            start=start,
            block_ids=self._blocks[index][: -(-end // 16)],
            sampling=sampling if is_last else None,
            history=tokens,
            num_prompt_tokens=end,
        )

    def compute(self, *chunks: Chunk) -> dict[str, Logprobs]:
        """Log-probabilities after the chunks that end their sequences."""
        sampled = self._runner.execute(StepPlan(list(chunks)))
        return {each.request_id: (each.top_ids, each.top_logprobs) for each in sampled}

    def in_parts(self, cuts: Sequence[int]) -> Logprobs:
        """The first sequence's, computed from `cuts[0]` on in parts that begin at `cuts`."""
        answers: dict[str, Logprobs] = {}
        for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
            answers = self.compute(self.chunk(0, start, end))
        return answers["0"]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def sequences(
    request: pytest.FixtureRequest,
    load_smollm2: Callable[..., LoadedModel],
    new_runner: Callable[..., ModelRunner],
) -> Sequences:
    runner = new_runner(
        load_smollm2(request.param),
        request.param,
        max_step_tokens=LENGTH,
        max_model_len=640,
        deterministic=True,
    )
    assert runner.verify_row_invariance() is None
    return Sequences(runner)


@pytest.fixture(scope="module")
def whole(sequences: Sequences) -> Logprobs:
    return sequences.in_parts([0])


@pytest.mark.parametrize("size", [512, 64, 16])
def test_prompt_chunks_change_nothing(sequences: Sequences, whole: Logprobs, size: int) -> None:
    assert sequences.in_parts(range(0, LENGTH, size)) == whole


def test_a_prompt_recomputed_after_decoding_changes_nothing(
    sequences: Sequences, whole: Logprobs
) -> None:
    """A restart recomputes as a prompt what was decoded token by token before."""
    decoded = [0, *range(LENGTH - 10, LENGTH)]
    assert sequences.in_parts(decoded) == whole
    assert sequences.in_parts([LENGTH - 10]) == whole
    assert sequences.in_parts([0, 251]) == whole


def test_neighbours_change_nothing(sequences: Sequences, whole: Logprobs) -> None:
    sequences.in_parts([0])
    lasts = {}
    for index, length in enumerate(LENGTHS_BESIDE, start=1):
        lasts |= sequences.compute(sequences.chunk(index, 0, length))
    decodes = [
        sequences.chunk(index, len(tokens) - 1, len(tokens))
        for index, tokens in enumerate(sequences.tokens)
    ]
    sixteen = sequences.compute(*decodes)
    assert sixteen["0"] == whole
    assert sixteen == {"0": whole, **lasts}
    mixed = sequences.compute(*decodes[:3], sequences.chunk(9, 0, 160), sequences.chunk(4, 20, 40))
    assert mixed == {name: sixteen[name] for name in ("0", "1", "2", "9", "4")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_parts_equal_proven_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 160, generator=generator).to(dtype).t().contiguous().t()
    x = torch.randn(72, 96, generator=generator).to(dtype)
    unproven = RowProducts()
    proven = RowProducts()
    assert proven.verify_row_invariance(weight, [8, 64, 72])
    parts = x.new_empty(72, 160)
    whole = x.new_empty(72, 160)
    unproven.multiply(x, weight, parts)
    proven.multiply(x, weight, whole)
    assert torch.equal(parts, whole)
    unproven.add(x, weight, parts)
    proven.add(x, weight, whole)
    assert torch.equal(parts, whole)
    assert torch.allclose(whole.double(), 2 * (x.double() @ weight.double()), atol=0.3, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_in_parts_equal_proven_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 16, 64, generator=generator).to(dtype)
    y = torch.randn(6, 256, 64, generator=generator).to(dtype).transpose(1, 2)
    unproven = RowProducts()
    proven = RowProducts()
    proven.verify_batched((6, 16, 64), y)
    parts = x.new_empty(6, 16, 256)
    whole = x.new_empty(6, 16, 256)
    unproven.multiply_each(x, y, parts)
    proven.multiply_each(x, y, whole)
    assert torch.equal(parts, whole)
    assert torch.allclose(whole.double(), x.double() @ y.double(), atol=0.3, rtol=0.02)


def test_what_depends_on_its_place_is_not_proven() -> None:
    # A product that is not a number differs from itself, as one that depends on its place does.
    assert not RowProducts().verify_row_invariance(torch.full((16, 16), torch.nan), [8, 16])
