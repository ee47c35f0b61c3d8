"""The library's steps equal those of the torch decoder over the same tiles."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace as changed

import pytest
import torch
from msgspec.structs import replace
from ullage_testing.native_models import (
    BLOCKS,
    CONTEXT,
    CPU,
    LIMITS,
    MANY,
    SHAPES,
    VOCAB,
    chunk,
    logits,
    make_model,
    make_runner,
    packed,
    random_tokens,
)

from ullage_engine.kernels import arena
from ullage_engine.layers.native_decoder import auto_kv_type, library_refusal
from ullage_engine.model_config.model_config import LayerSpec
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.protocol.step_plan import NO_TOKEN, StepPlan
from ullage_engine.quantization.formats import code_bytes
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("isa", "seed")

MOST = {torch.float32: (5e-4, 0.05), torch.bfloat16: (1e-2, 0.15)}
"""Most by which logits may differ from those with keys and values in float32: 1 less the cosine,
and the largest difference as a share of the largest logit. What differs in the last bit before rows
are rounded may differ by a step behind it."""


def damaged(loaded: LoadedModel, name: str, tensor: torch.Tensor) -> LoadedModel:
    return changed(loaded, tensors=loaded.tensors | {name: tensor})


@pytest.fixture(params=[*SHAPES[:2], SHAPES[6]], ids=["llama", "qwen3", "lfm2_moe"])
def loaded(request: pytest.FixtureRequest, seed: int) -> LoadedModel:
    return make_model(request.param)


def test_steps_equal_the_torch_decoders(subtests: pytest.Subtests) -> None:
    """Prompts, decodes and both together, over one span of context and over several."""
    for shape in SHAPES:
        if shape.experts:  # one choice of weights: rounding decides between experts that are equal
            torch.manual_seed(20_261)
        long = random_tokens(CONTEXT)
        short = random_tokens(40)
        steps = [
            [chunk(0, long, 0, 700), chunk(1, short, 0, 39)],
            [chunk(1, short, 39, 40), chunk(0, long, 700, 1001)],
            [chunk(0, long, 1001, 1002)],
        ]
        loaded = make_model(shape)
        plain = make_runner(loaded, uses_library=False)
        wanted = [logits(plain, *step) for step in steps]
        for kv_type, (most_angle, most) in MOST.items():
            few = shape.experts and shape.experts.experts_per_token < shape.experts.num_experts
            if few and kv_type == torch.bfloat16:
                continue  # it chooses other experts
            own = make_runner(loaded, kv_type=kv_type)
            for step, expected in zip(steps, wanted, strict=True):
                with subtests.test(shape=shape, kv_type=kv_type, chunks=len(step)):
                    found = logits(own, *step)
                    cosine = torch.nn.functional.cosine_similarity(found, expected)
                    assert cosine.min() > 1 - most_angle
                    assert (found - expected).abs().max() < most * expected.abs().max()


def test_keys_and_values_of_float8_are_those_of_the_torch_decoder(
    subtests: pytest.Subtests,
) -> None:
    """A block's keys lie [head_dim, tokens] here and [tokens, head_dim] there. What differs in the
    last bit before it is rounded may get another code."""
    limits = changed(LIMITS, fp8_kv=True)
    tokens = random_tokens(CONTEXT)
    step = [chunk(0, tokens, 0, CONTEXT - 1)], [chunk(0, tokens, CONTEXT - 1, CONTEXT)]
    for shape in [*SHAPES[:6], SHAPES[8]]:
        loaded = make_model(shape)
        own, plain = (make_runner(loaded, is_own, limits=limits) for is_own in (True, False))
        answers = [[logits(runner, *chunks) for chunks in step][-1] for runner in (own, plain)]
        with subtests.test(shape=shape):
            assert torch.nn.functional.cosine_similarity(*answers).min() > 0.99
        for index, (ours, theirs) in enumerate(zip(own._kv.layers, plain._kv.layers, strict=True)):
            keys, values = ours.blocks.unflatten(2, (-1, 16)).split(shape.kv_heads)
            others = theirs.blocks.unflatten(2, (16, -1)).transpose(2, 3).split(shape.kv_heads)
            with subtests.test(shape=shape, layer=index):
                assert keys.count_nonzero() > 0.9 * CONTEXT * shape.kv_heads * shape.head_dim
                for found, wanted in ((keys, others[0]), (values.flatten(2), others[1])):
                    wanted = wanted if found is keys else wanted.transpose(2, 3).flatten(2)
                    most = 0.2 if index else 0.01
                    assert (found != wanted).sum() < most * found.count_nonzero()


def test_replayed_tokens_rebuild_the_state_of_convolutions(subtests: pytest.Subtests) -> None:
    """Their keys and values stay, as their own rows were computed from less."""
    for dtype in (torch.float32, torch.bfloat16):
        runner = make_runner(make_model(SHAPES[6]), dtype=dtype)
        tokens = random_tokens(100)
        assert runner.model_config.replay_tokens == 4
        logits(runner, chunk(0, tokens, 0, 90))
        wanted = logits(runner, chunk(0, tokens, 90, 100))
        before = runner._kv.blocks.clone()
        for replayed in (4, 10, 90):
            with subtests.test(dtype=dtype, replayed=replayed):
                assert torch.equal(logits(runner, chunk(0, tokens, 90, 100, replayed)), wanted)
                assert torch.equal(runner._kv.blocks, before)


def test_experts_are_computed_alike_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES[6:]:
        loaded = make_model(shape)
        tokens = random_tokens(300)
        wanted = logits(make_runner(loaded), chunk(0, tokens, 0, 300))
        with monkeypatch.context() as patch:
            patch.setitem(arena.SLICE_TOKENS, "cpu", 64)
            assert torch.equal(logits(make_runner(loaded), chunk(0, tokens, 0, 300)), wanted)


def test_contexts_are_attended_alike_where_partial_results_have_no_room(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(CONTEXT)
    wanted = logits(make_runner(loaded), chunk(0, tokens, 0, CONTEXT))
    monkeypatch.setattr(arena, "MAX_PARTIALS", 16)
    runner = make_runner(loaded)
    logits(runner, chunk(0, tokens, 0, CONTEXT - 1))
    assert torch.equal(logits(runner, chunk(0, tokens, CONTEXT - 1, CONTEXT)), wanted)


def test_a_row_has_the_same_bits_however_its_context_was_cut(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    tokens = random_tokens(CONTEXT)
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
    runner = make_runner(loaded)
    tokens = random_tokens(30)
    other = random_tokens(20)
    one_by_one = [logits(runner, chunk(0, tokens, end - 1, end)) for end in range(1, 31)]
    beside = logits(runner, chunk(1, other, 0, 20))
    logits(runner, chunk(2, tokens, 0, 26))
    tried = replace(chunk(2, tokens, 26, 30), num_sampled=3)
    wanted = torch.cat([beside, *one_by_one[-3:]])
    plan = StepPlan([chunk(1, other, 0, 20), tried])
    assert torch.equal(logits(runner, *plan.chunks), wanted)
    assert [each.token_id for each in runner.execute(plan)] == wanted.argmax(-1).tolist()


def test_hidden_states_give_the_logits_of_every_row(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    tokens = random_tokens(30)
    hidden = runner.hidden(StepPlan([chunk(0, tokens, 0, 30)]))
    out = torch.empty(30, VOCAB)
    runner.write_logits(hidden, out)
    for end in (1, 17, 30):
        assert torch.equal(out[end - 1], logits(runner, chunk(1, tokens, 0, end))[0])


def test_damaged_weights_give_no_token(subtests: pytest.Subtests) -> None:
    """One number of a vector, or the scale of some weights of a query, is no number.

    In the last layer only the last row's own attention shows it.
    """
    loaded = make_model(SHAPES[1])
    matrix = "layers.1.qkv.values"
    size = code_bytes(loaded.encodings["layers.1.qkv"])
    scales = loaded.tensors[matrix].clone()
    scales[0, 0, size : size + 2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    for name, tensor in (
        ("norm", with_nan(loaded.tensors["norm"])),
        ("layers.1.k_norm", with_nan(loaded.tensors["layers.1.k_norm"])),
        (matrix, scales),
    ):
        runner = make_runner(damaged(loaded, name, tensor))
        for count in (9, 16, 300):
            with subtests.test(tensor=name, tokens=count):
                plan = StepPlan([chunk(0, random_tokens(count), 0, count)])
                [sampled] = runner.execute(plan)
                assert sampled.token_id == NO_TOKEN


def test_damaged_weights_have_no_scales_of_float8(loaded: LoadedModel) -> None:
    layers = loaded.model_config.layers
    name = f"layers.{max(i for i, each in enumerate(layers) if each.mixer != 'conv')}.mixer_norm"
    extreme = damaged(loaded, name, with_nan(loaded.tensors[name]))
    with pytest.raises(WeightsError, match=r"contain NaN, so spec\.model\.kvDtype FP8"):
        make_runner(extreme, limits=changed(LIMITS, fp8_kv=True))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor([3]), torch.nan)


@pytest.mark.parametrize("up", [1.0, 1e-3])
def test_gates_far_below_zero_are_shut(loaded: LoadedModel, up: float) -> None:
    """From -8 to -8,000, where e^-x has no place in a float32, nor has the inverse of what is
    left."""
    config = loaded.model_config
    hidden = config.hidden
    width = config.intermediate
    steps = torch.logspace(1, 4, width).neg() / hidden
    gate_up = torch.cat([steps[:, None].expand(width, hidden), up * torch.randn(width, hidden)])
    name = "layers.0.gate_up"
    extreme = damaged(loaded, "layers.0.mlp_norm", torch.ones(hidden))
    extreme = changed(
        extreme, tensors=extreme.tensors | packed(name, gate_up, loaded.encodings[name])
    )
    # Rows of one sign, which no layer before changes much.
    embedding = torch.rand(VOCAB, hidden) + 10
    pieces = packed("embedding", embedding, loaded.encodings["embedding"])
    extreme = changed(extreme, tensors=extreme.tensors | pieces)
    plan = StepPlan([chunk(0, random_tokens(9), 0, 9)])
    found, wanted = (make_runner(extreme, own).hidden(plan) for own in (True, False))
    assert torch.allclose(found, wanted, rtol=0.01, atol=0.01 * float(wanted.abs().max()))


def test_a_token_that_the_model_has_not_is_refused(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    for token in (VOCAB, VOCAB + 100_000, -1):
        with pytest.raises(IndexError):
            logits(runner, chunk(0, [1, token], 0, 2))


def test_what_the_library_does_not_compute_is_named(
    loaded: LoadedModel, subtests: pytest.Subtests
) -> None:
    config = loaded.model_config
    spec = replace(MANY, is_biased=True)
    part = {name: each for name, each in loaded.encodings.items() if name != "layers.0.down"}

    def other(**changes: object) -> LoadedModel:
        return changed(loaded, model_config=replace(config, **changes))

    refused = [
        (loaded, LIMITS, torch.device("cuda"), torch.float32, "no CPU"),
        (loaded, LIMITS, CPU, torch.float16, "model.dtype is float16; set auto"),
        (other(layers=(LayerSpec(window=9),)), LIMITS, CPU, torch.float32, "windows"),
        (loaded, changed(LIMITS, windowed=True), CPU, torch.float32, "windows"),
        (other(conv_channels=48), LIMITS, CPU, torch.float32, "part"),
        (other(experts=spec), LIMITS, CPU, torch.float32, "experts have biases"),
        (other(experts=replace(MANY, scoring="softmax")), LIMITS, CPU, torch.float32, "softmax"),
        (other(has_sinks=True), LIMITS, CPU, torch.float32, "sinks"),
        (other(hidden=104), LIMITS, CPU, torch.float32, "104"),
        (other(first_layer=1), LIMITS, CPU, torch.float32, "part"),
        (changed(loaded, encodings=part), LIMITS, CPU, torch.float32, "layers.0.down"),
    ]
    for model, limits, device, dtype, words in refused:
        with subtests.test(words=words):
            refusal = library_refusal(model, limits, device, dtype)
            assert words in refusal
            assert auto_kv_type(refusal, dtype) == dtype
    for dtype in (torch.float32, torch.bfloat16):
        refusal = library_refusal(loaded, LIMITS, CPU, dtype)
        assert not refusal
        assert auto_kv_type(refusal, dtype) == torch.bfloat16


def test_a_text_is_computed_with_the_keys_and_values_of_a_service(loaded: LoadedModel) -> None:
    size = loaded.model_config.kv_bytes_per_token(1)
    assert TextPass(loaded, torch.float32, 32).kv_token_bytes == 2 * size
    assert TextPass(loaded, torch.float32, 32, lambda _, each: each).kv_token_bytes == 4 * size
    assert TextPass(loaded, torch.float32, 32, kv_dtype="fp8").kv_token_bytes == size


def test_float16_is_computed_by_torch(loaded: LoadedModel) -> None:
    """Matrices are int8 as ever, and keys and values of a type that the library does not read."""
    plain = {
        name: tensor.half() if tensor.dtype == torch.float32 else tensor
        for name, tensor in loaded.tensors.items()
    }
    runner = ModelRunner(
        changed(loaded, tensors=plain), CPU, torch.float16, changed(LIMITS, itemsize=2)
    )
    runner.allocate_arena()
    runner.allocate_kv(BLOCKS)
    tokens = random_tokens(9)
    found = logits(runner, chunk(0, tokens, 0, 9)).float()
    wanted = logits(make_runner(loaded), chunk(0, tokens, 0, 9))
    assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.99


def test_smollm2_answers_as_the_torch_decoder(load_smollm2: Callable[..., LoadedModel]) -> None:
    """The file's own blocks, as a service has them that chooses nothing.

    A row that is rounded to int8 beside a boundary moves one prompt's logits a hundred times as far
    as the others' (cosines of 0.998 and of 0.99998 were seen), whichever order sums have: the
    median tells a fault from rounding.
    """
    loaded = load_smollm2(quantization="auto")
    assert {each.format for each in loaded.encodings.values()} == {"int4", "int8"}

    prompts = [[504, 3575, 282, 4649, 314] * 60]
    prompts += [torch.randint(100, 40_000, (120,)).tolist() for _ in range(14)]
    angles = []
    for tokens in prompts:
        (chosen, found), (wanted, expected) = (
            continue_prompt(loaded, uses_library, tokens) for uses_library in (True, False)
        )
        if chosen == wanted:
            cosine = torch.nn.functional.cosine_similarity(found, expected)
            angles.append(1 - float(cosine.min()))

    assert len(angles) >= 5
    assert statistics.median(angles) < 2e-4
    assert max(angles) < 1e-2


def continue_prompt(
    loaded: LoadedModel, uses_library: bool, tokens: list[int]
) -> tuple[list[int], torch.Tensor]:
    """Return eight greedy tokens and the logits behind them."""
    runner = make_runner(loaded, uses_library, num_blocks=8 * (len(tokens) // 16 + 2))
    last = logits(runner, chunk(0, tokens, 0, len(tokens)))
    history = list(tokens)
    chosen = []
    for _ in range(8):
        chosen.append(int(last.argmax()))
        history.append(chosen[-1])
        last = logits(runner, chunk(0, history, len(history) - 1, len(history)))
    return chosen, last.float()
