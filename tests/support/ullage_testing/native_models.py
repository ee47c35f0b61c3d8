"""Small models of every shape that the C++ library's code differs by, and steps of them."""

from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import MATRICES, VOCABULARY
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.quantization.formats import Encoding, Format, pack, quantise
from ullage_engine.runner.model_runner import ModelRunner

CPU = torch.device("cpu")
VOCAB = 208
CONTEXT = 1100
BLOCKS = 600
LIMITS = StepLimits(
    max_tokens=CONTEXT, max_rows=16, max_model_len=CONTEXT, gather_tokens=2048, itemsize=4
)
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Shape:
    """What a model may be as far as the library's code differs by it."""

    format: Format = "int8"
    group: int = 32
    head_dim: int = 32
    heads: int = 6
    kv_heads: int = 2
    has_qk_norm: bool = False
    tied: bool = True
    layers: tuple[LayerSpec, ...] = (LayerSpec(), LayerSpec())
    experts: ExpertsSpec | None = None


DENSE_CONV = LayerSpec(mixer="conv")
DENSE_ATTENTION = LayerSpec()
CONV = LayerSpec(mixer="conv", feed_forward="experts")
ATTENTION = LayerSpec(feed_forward="experts")
SIGMOID = ExpertsSpec(
    num_experts=6, experts_per_token=3, intermediate=80, scoring="sigmoid", scale=1.5
)
MANY = replace(SIGMOID, num_experts=20, experts_per_token=2, intermediate=32)
UNNORMALISED = replace(SIGMOID, is_normalised=False, experts_per_token=6, scale=1.0)

SHAPES = [
    Shape(),
    Shape("int8", 16, 64, 4, 4, has_qk_norm=True),
    Shape("int4", 32, 64, 8, 1, tied=False),
    Shape("int4", 16, 128, 8, 1),
    Shape("int8", 32, 128, 3, 3),
    Shape("int4", 32, layers=(DENSE_CONV, DENSE_ATTENTION, DENSE_CONV)),
    Shape("int8", 16, layers=(DENSE_CONV, CONV, ATTENTION), experts=SIGMOID),
    Shape("int4", 32, layers=(ATTENTION, ATTENTION), experts=MANY),
    Shape("int8", 16, layers=(ATTENTION, CONV, ATTENTION), experts=UNNORMALISED),
]


def make_model(shape: Shape) -> LoadedModel:
    """A model of a few layers whose weights are random."""
    is_hybrid = shape.experts is not None or any(each.mixer == "conv" for each in shape.layers)
    model_config = ModelConfig(
        architecture="lfm2_moe" if is_hybrid else "qwen3" if shape.has_qk_norm else "llama",
        layers=shape.layers,
        hidden=96,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=160,
        vocab=VOCAB,
        max_position=CONTEXT,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied=shape.tied,
        has_qk_norm=shape.has_qk_norm,
        conv_kernel=3 if is_hybrid else 0,
        conv_channels=96 if is_hybrid else 0,
        experts=shape.experts,
    )
    tensors: dict[str, torch.Tensor] = {}
    encodings = {}
    for plan in plan_tensors(model_config):
        weights = 0.2 * torch.randn(plan.shape)
        if plan.name.rpartition(".")[2] in MATRICES | VOCABULARY:
            weights = weights.flatten(0, -2)  # the experts' one above the other
            encodings[plan.name] = tiles(weights, shape.format, shape.group)
            tensors |= packed(plan.name, weights, encodings[plan.name])
        else:
            tensors[plan.name] = weights + (weights.dim() == 1)
    return LoadedModel(model_config, tensors, 0, encodings)


def tiles(weights: torch.Tensor, format: Format, group: int) -> Encoding:
    shape = (weights.shape[0], weights.shape[1])
    return Encoding(format=format, shape=shape, group=group, has_zeros=True, is_tiled=True)


def packed(name: str, weights: torch.Tensor, encoding: Encoding) -> dict[str, torch.Tensor]:
    pieces = pack(quantise(weights, encoding, torch.float32), encoding, torch.float32)
    return {f"{name}.{piece}": tensor for piece, tensor in pieces.items()}


def make_runner(
    loaded: LoadedModel,
    uses_library: bool = True,
    kv_type: torch.dtype = torch.bfloat16,
    num_blocks: int = BLOCKS,
    dtype: torch.dtype = torch.float32,
    limits: StepLimits = LIMITS,
) -> ModelRunner:
    """Matrices that something may be put between are the torch decoder's, whose KV is float32."""
    wrap = None if uses_library else lambda _, matrix: matrix
    kv_type = kv_type if uses_library else torch.float32
    runner = ModelRunner(loaded, CPU, dtype, limits, wrap=wrap, kv_type=kv_type)
    runner.allocate_arena()
    runner.allocate_kv(num_blocks)
    assert bool(runner._limits.library_threads) == uses_library
    return runner


STATES = dict.fromkeys(range(16), 0)
"""The state of each sequence that was written last: of its two slots one is read, one written."""


def chunk(slot: int, tokens: list[int], start: int, end: int, replayed: int = 0) -> Chunk:
    """Tokens start to end of a sequence, in blocks that lie apart. `replayed` of them before that
    rebuild the states of convolutions."""
    state_slot = 2 * slot + STATES[slot]
    STATES[slot] = 1 - STATES[slot]
    blocks = [slot + 8 * block for block in range(-(-end // 16))]
    return Chunk(
        request_id=str(slot),
        token_ids=tokens[start - replayed : end],
        start=start - replayed,
        block_ids=blocks,
        sampling=GREEDY,
        history=tokens,
        num_prompt_tokens=len(tokens),
        num_replayed=replayed,
        state_slot=state_slot if start and not replayed else None,
        next_state_slot=2 * slot + STATES[slot],
    )


def logits(runner: ModelRunner, *chunks: Chunk) -> torch.Tensor:
    return torch.cat([each.clone() for _, each in runner.logits(StepPlan(list(chunks)))])


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,)).tolist()
