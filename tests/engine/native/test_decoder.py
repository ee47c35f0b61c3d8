"""The library's steps equal those of the torch decoder over the same tiles.

Weights and tokens differ from run to run; a failure prints their seed.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ullage_common.config.engine import ModelSection
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import NO_TOKEN, Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    instruction_set() is None, reason="this processor has no instruction set of the library"
)

VOCAB, CONTEXT, BLOCKS = 208, 1100, 600
LIMITS = StepLimits(
    max_tokens=CONTEXT, max_rows=16, max_model_len=CONTEXT, gather_tokens=2048, itemsize=4
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "max_position_embeddings": CONTEXT,
}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Callable[..., Any],
) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    random_model(request.param, torch.seed() % 2**31, **SIZES).save_pretrained(folder)
    section = ModelSection(source=f"file://{folder}", name="test", quantization="int8")
    cpu, prepared = torch.device("cpu"), folder / "prepared"
    return load_weights(section, cpu, torch.float32, prepared, lambda done, total: None)


def make_runner(loaded: LoadedModel, is_native: bool = True) -> ModelRunner:
    """Matrices that something may be put between are the torch decoder's."""
    wrap = None if is_native else lambda name, matrix: matrix
    runner = ModelRunner(loaded, torch.device("cpu"), torch.float32, LIMITS, wrap=wrap)
    runner.allocate_arena()
    runner.allocate_kv(BLOCKS)
    assert bool(runner._limits.native) == is_native
    return runner


def chunk(slot: int, tokens: list[int], start: int, end: int) -> Chunk:
    """Tokens start to end of a sequence, in blocks that lie apart."""
    blocks = [slot + 8 * block for block in range(-(-end // 16))]
    return Chunk(
        request_id=str(slot),
        token_ids=tokens[start:end],
        start=start,
        block_ids=blocks,
        sampling=GREEDY,
        history=tokens,
        num_prompt_tokens=len(tokens),
    )


def logits(runner: ModelRunner, *chunks: Chunk) -> torch.Tensor:
    return torch.cat([each.clone() for _, each in runner.logits(StepPlan(list(chunks)))])


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,)).tolist()


def test_steps_equal_the_torch_decoders(loaded: LoadedModel) -> None:
    """Prompts, decodes and both together, over one span of context and over several."""
    native, plain = make_runner(loaded), make_runner(loaded, is_native=False)
    long, short = random_tokens(CONTEXT), random_tokens(40)
    steps = [
        [chunk(0, long, 0, 700), chunk(1, short, 0, 39)],
        [chunk(1, short, 39, 40), chunk(0, long, 700, 1001)],
        [chunk(0, long, 1001, 1002)],
    ]
    for step in steps:
        found, wanted = logits(native, *step), logits(plain, *step)
        # Rows that differ in the last bit before they are rounded may differ by a step after it.
        assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.999
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_row_has_the_same_bits_however_its_context_was_cut(loaded: LoadedModel) -> None:
    runner, tokens = make_runner(loaded), random_tokens(CONTEXT)
    wanted = logits(runner, chunk(0, tokens, 0, CONTEXT))
    others = [random_tokens(60) for _ in range(6)]
    for cuts in ([0, 1, 300, 1099, CONTEXT], [0, 255, 257, 512, 1098, CONTEXT]):
        for start, end in itertools.pairwise(cuts):
            beside = [chunk(slot, each, 0, 60) for slot, each in enumerate(others, 1)]
            beside = beside if start % 2 and end - start < 700 else []
            found = logits(runner, chunk(0, tokens, start, end), *beside)
        assert torch.equal(found[0], wanted[0])


def test_the_likeliest_token_is_known_without_reading_logits(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    chunks = [chunk(slot, random_tokens(20), 0, 20) for slot in range(5)]
    wanted = logits(runner, *chunks).argmax(-1).tolist()
    assert [each.token_id for each in runner.execute(StepPlan(chunks))] == wanted


def test_a_chunk_is_sampled_behind_several_of_its_tokens(loaded: LoadedModel) -> None:
    runner, tokens, other = make_runner(loaded), random_tokens(30), random_tokens(20)
    one_by_one = [logits(runner, chunk(0, tokens, end - 1, end)) for end in range(1, 31)]
    beside = logits(runner, chunk(1, other, 0, 20))
    logits(runner, chunk(2, tokens, 0, 26))
    tried = replace(chunk(2, tokens, 26, 30), num_sampled=3)
    wanted = torch.cat([beside, *one_by_one[-3:]])
    plan = StepPlan([chunk(1, other, 0, 20), tried])
    assert torch.equal(logits(runner, *plan.chunks), wanted)
    assert [each.token_id for each in runner.execute(plan)] == wanted.argmax(-1).tolist()


def test_hidden_states_give_the_logits_of_every_row(loaded: LoadedModel) -> None:
    runner, tokens = make_runner(loaded), random_tokens(30)
    hidden = runner.hidden(StepPlan([chunk(0, tokens, 0, 30)]))
    out = torch.empty(30, VOCAB)
    runner.write_logits(hidden, out)
    for end in (1, 17, 30):
        assert torch.equal(out[end - 1], logits(runner, chunk(1, tokens, 0, end))[0])


def test_damaged_weights_give_no_token(loaded: LoadedModel) -> None:
    tensors = dict(loaded.tensors)
    tensors["norm"] = torch.full_like(tensors["norm"], torch.nan)
    damaged = LoadedModel(loaded.model_config, tensors, loaded.nbytes, loaded.encodings)
    [sampled] = make_runner(damaged).execute(StepPlan([chunk(0, random_tokens(9), 0, 9)]))
    assert sampled.token_id == NO_TOKEN
