"""Models with random weights that are drawn on the device, and decode chunks to measure them."""

import torch

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import FLOAT32, is_matrix
from ullage_engine.model_loader.tensor_plan import TensorPlan, plan_tensors
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk
from ullage_engine.quantization.formats import (
    MXFP4_GROUP,
    SCALES,
    VALUES,
    Encoding,
    Format,
    chosen_encoding,
    pack,
    pieces_of,
    quantise,
)

STRIDE = 7919
"""A prime distance between the token ids of rows, so that rows choose different experts."""

MXFP4_SCALES = (118, 122)
"""Range of the scales for random MXFP4 weights, 2^-9 to 2^-6 (the end is exclusive). Rows of a few
thousand values up to 6 then have norms of about 1."""


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, format: Format | None = None
) -> LoadedModel:
    """Draw a model's weights from a fixed seed. The experts of gpt-oss are in MXFP4.

    Args:
        format: format of the other matrices, quantized as in the loader, or None for `dtype`.
    """
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    encodings: dict[str, Encoding] = {}

    for plan in plan_tensors(config):
        if config.architecture == "gpt_oss" and _is_expert_matrix(plan):
            shape = (plan.shape[0] * plan.shape[1], plan.shape[2])
            encodings[plan.name] = Encoding(format="mxfp4", shape=shape, group=MXFP4_GROUP)
            tensors |= _random_mxfp4(plan.name, encodings[plan.name], generator)
            continue

        weights = _random_plain(plan, dtype, generator)
        if format is None or not is_matrix(plan):
            tensors[plan.name] = weights
            continue

        rows, columns = plan.shape
        encoding = chosen_encoding(format, (rows, columns))
        encodings[plan.name] = encoding
        pieces = pack(quantise(weights, encoding, dtype), encoding, dtype)
        tensors |= {f"{plan.name}.{piece}": each for piece, each in pieces.items()}

    return LoadedModel(config, tensors, sum(each.nbytes for each in tensors.values()), encodings)


def _random_plain(plan: TensorPlan, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw a matrix whose rows have a norm of about 1. Norm weights are near 1."""
    is_float32 = plan.name.rpartition(".")[2] in FLOAT32
    weights = torch.randn(
        plan.shape,
        generator=generator,
        device=generator.device,
        # Drawn in the computing type, because a stack of experts in float32 is twice as large.
        dtype=torch.float32 if is_float32 else dtype,
    )
    weights.mul_(plan.shape[-1] ** -0.5)
    return weights.add_(1) if plan.name.endswith("norm") else weights


def _is_expert_matrix(plan: TensorPlan) -> bool:
    return plan.name.endswith(("experts_gate_up", "experts_down"))


def _random_mxfp4(
    name: str, encoding: Encoding, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draw the parts of a packed matrix. Any byte is two valid values, but scales have a range."""
    ranges = {VALUES: (0, 256), SCALES: MXFP4_SCALES}
    return {
        f"{name}.{piece.name}": torch.randint(
            *ranges[piece.name],
            piece.shape,
            dtype=piece.dtype,
            device=generator.device,
            generator=generator,
        )
        for piece in pieces_of(encoding, torch.bfloat16)
    }


def decode_of(row: int, context: int, blocks: int, vocab: int, sampling: SamplingParams) -> Chunk:
    """Return a chunk that decodes the last token of a context, with separate blocks and states."""
    return Chunk(
        request_id=str(row),
        token_ids=[STRIDE * row % vocab],
        start=context - 1,
        block_ids=list(range(row * blocks, (row + 1) * blocks)),
        sampling=sampling,
        history=[7] * context,
        num_prompt_tokens=context,
        state_slot=2 * row,
        next_state_slot=2 * row + 1,
    )
