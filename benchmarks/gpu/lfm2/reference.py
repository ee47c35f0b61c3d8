"""Computes the expected logits of LFM2 directly from its formulas, without the engine's layers.

All samples pass through one layer before the next layer's weights are drawn, so that the reference
needs the memory of only one layer. The reference also returns how close each sample came to
choosing other experts. If the last expert chosen and the first one not chosen differ by no more
than rounding, two correct implementations may choose different experts. Their logits then differ by
far more than rounding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.lfm2.weights import SeededWeights
from ullage_engine.model_config.model_config import ExpertsSpec, ModelConfig

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """All results except the logits, which would be 13 GB for all positions of 1,536 samples."""

    hidden: torch.Tensor
    """Normalised hidden states [samples, tokens, hidden] after the last layer."""
    head: torch.Tensor
    """Weight matrix [vocab, hidden] that computes logits."""
    margins: torch.Tensor
    """[samples]: the minimum difference between a chosen expert and one not chosen."""
    load: torch.Tensor
    """[experts]: number of tokens that chose each expert, over all layers."""

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [rows, vocab] for some rows of `hidden`."""
        return (rows @ self.head.t()).float()


@torch.inference_mode()
def compute_reference(
    model_config: ModelConfig,
    weights: SeededWeights,
    prompts: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Compute the reference results for prompts [samples, tokens] in `dtype`."""
    assert model_config.experts is not None, "a reference of mixtures of experts"
    ends = _cast(weights.ends(), dtype)
    device = ends["norm"].device
    x = ends["embedding"][prompts.to(device)]

    margins = torch.full((len(prompts),), float("inf"), device=device)
    load = torch.zeros(model_config.experts.num_experts, dtype=torch.int64, device=device)

    for index, spec in enumerate(model_config.layers):
        prefix = f"layers.{index}."
        layer = _cast(weights.layer(index), dtype)
        own = {name.removeprefix(prefix): tensor for name, tensor in layer.items()}
        mixer = _conv if spec.mixer == "conv" else _attention
        x = x + mixer(model_config, own, _norm(x, own["mixer_norm"], model_config.rms_eps))

        normed = _norm(x, own["mlp_norm"], model_config.rms_eps)
        if spec.feed_forward == "dense":
            x = x + _mlp(normed, own["gate_up"], own["down"])
            continue

        routing = _route(model_config.experts, own, normed)
        x = x + _experts(own, normed, routing)
        margins = torch.minimum(margins, routing.margins.amin(dim=1))
        load += torch.bincount(routing.chosen.flatten(), minlength=len(load))
    normed = _norm(x, ends["norm"], model_config.rms_eps)
    return Reference(normed, ends["embedding"], margins, load.cpu())


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _conv(model_config: ModelConfig, own: Tensors, x: torch.Tensor) -> torch.Tensor:
    b, c, u = F.linear(x, own["conv_in"]).chunk(3, dim=-1)
    padded = F.pad((b * u).transpose(1, 2), (model_config.conv_kernel - 1, 0))
    mixed = F.conv1d(padded, own["conv"][:, None], groups=model_config.hidden)
    return F.linear(c * mixed.transpose(1, 2), own["conv_out"])


def _attention(model_config: ModelConfig, own: Tensors, x: torch.Tensor) -> torch.Tensor:
    heads = model_config.num_heads
    kv_heads = model_config.num_kv_heads
    size = model_config.head_dim
    qkv = F.linear(x, own["qkv"]).view(*x.shape[:2], -1, size).transpose(1, 2)
    q = _norm(qkv[:, :heads], own["q_norm"], model_config.rms_eps)
    k = _norm(qkv[:, heads : heads + kv_heads], own["k_norm"], model_config.rms_eps)
    v = qkv[:, heads + kv_heads :]
    q = _rotate(q, model_config.rope_theta)
    k = _rotate(k, model_config.rope_theta)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * size**-0.5
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return F.linear(attended.transpose(1, 2).flatten(2), own["output"])


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate each pair (i, i + size / 2) as a complex number by position theta^(-2 i / size)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(x.device)
    turned = torch.complex(x[..., :half].float(), x[..., half:].float()) * turns
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class _Routing:
    chosen: torch.Tensor  # [samples, tokens, experts_per_token]
    weights: torch.Tensor  # [samples, tokens, experts_per_token]
    margins: torch.Tensor  # [samples, tokens]


def _route(spec: ExpertsSpec, own: Tensors, x: torch.Tensor) -> _Routing:
    sigmoids = F.linear(x, own["router"]).sigmoid()
    ranked, order = (sigmoids + own["router_bias"]).sort(dim=-1, descending=True)
    count = spec.experts_per_token
    chosen = order[..., :count]
    weights = sigmoids.gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6) * spec.scale
    return _Routing(chosen, weights, ranked[..., count - 1] - ranked[..., count])


def _experts(own: Tensors, x: torch.Tensor, routing: _Routing) -> torch.Tensor:
    rows = x.flatten(0, 1)
    out = torch.zeros_like(x).flatten(0, 1)
    chosen = routing.chosen.flatten(0, 1)
    weights = routing.weights.flatten(0, 1)
    for expert, (gate_up, down) in enumerate(
        zip(own["experts_gate_up"], own["experts_down"], strict=True)
    ):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        result = _mlp(rows[tokens], gate_up, down) * weights[tokens, places, None]
        out.index_add_(0, tokens, result)
    return out.view_as(x)
