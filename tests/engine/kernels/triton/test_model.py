"""A whole model computed by the kernels equals the same model computed by torch's operations."""

from dataclasses import replace

import torch

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import KVPool, StatePool, allocate
from ullage_engine.layers.attention import AttentionBackend, DefaultBackend, PagedBackend
from ullage_engine.layers.decoder import Decoder, Weights
from ullage_engine.layers.moe import expert_linears
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan

GEOMETRY = ModelConfig(
    architecture="lfm2_moe",
    layers=(
        LayerSpec(mixer="conv"),
        LayerSpec(),
        LayerSpec(mixer="conv", feed_forward="experts"),
        LayerSpec(window=20),
    ),
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=48,
    vocab=97,
    max_position=128,
    rope_theta=1e6,
    rms_eps=1e-5,
    tied=True,
    has_qk_norm=True,
    conv_kernel=3,
    conv_channels=64,
    experts=ExpertsSpec(num_experts=4, experts_per_token=2, intermediate=32, scoring="sigmoid"),
)
LIMITS = StepLimits(
    max_tokens=64,
    max_rows=8,
    max_model_len=128,
    gather_tokens=512,
    block_tokens=16,
    itemsize=4,
)


def chunk(number: int, start: int, end: int) -> Chunk:
    """Part of a sequence; what comes before it was computed by another chunk."""
    tokens = [(11 * place * (number + 3)) % 97 for place in range(end)]
    return Chunk(
        request_id=str(number),
        token_ids=tokens[start:],
        start=start,
        block_ids=list(range(number, 32, 4))[: -(-end // 16)],
        sampling=SamplingParams(temperature=0.0),
        history=tokens,
        num_prompt_tokens=end,
        state_slot=2 * number if start else None,
        next_state_slot=2 * number + (start > 0),
    )


STEPS = [
    [chunk(0, 0, 40), chunk(1, 0, 1)],
    [chunk(2, 0, 17)],
    [chunk(0, 40, 41), chunk(1, 1, 2), chunk(2, 17, 30), chunk(3, 0, 5)],
]


def logits_of_steps(
    tensors: dict[str, torch.Tensor], device: torch.device, *, fused: bool
) -> list[torch.Tensor]:
    limits = replace(LIMITS, fused=fused)
    arena = allocate(step_arena(GEOMETRY, limits), torch.float32, device)
    backend: AttentionBackend = (
        PagedBackend(GEOMETRY, arena["partials"])
        if fused
        else DefaultBackend(GEOMETRY, limits, arena)
    )
    weights = Weights(
        tensors,
        linear=lambda name: backend.linear(tensors[name]),
        experts=lambda name: expert_linears(tensors[name], backend.linear, False),
    )
    decoder = Decoder(weights, GEOMETRY, limits, arena, backend)
    pool = KVPool(GEOMETRY, 32, 16, torch.float32, device)
    states = StatePool(GEOMETRY, 16, torch.float32, device)
    results = []
    for chunks in STEPS:
        batch = build_batch(
            StepPlan(chunks), 16, 512, conv_kernel=3, scratch_block=pool.scratch_block
        )
        hidden = decoder.forward(batch, pool.layers, states.layers)
        out = torch.empty(limits.product_rows(len(chunks)), GEOMETRY.vocab, device=device)
        decoder.logits(hidden, batch.sampled_rows, out)
        results.append(out[: len(chunks)])
    return results


@torch.inference_mode()
def test_a_hybrid_model_with_windows_and_experts(device: torch.device) -> None:
    tensors = {
        plan.name: torch.randn(plan.shape, device=device) * plan.shape[-1] ** -0.5
        for plan in plan_tensors(GEOMETRY)
    }
    plain = logits_of_steps(tensors, device, fused=False)
    fused = logits_of_steps(tensors, device, fused=True)
    for expected, actual in zip(plain, fused, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
