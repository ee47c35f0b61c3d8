"""Random weights for LFM2-8B-A1B, drawn from a seed layer by layer and equal in every process.

The prompts are random, too. The router's bias prefers some experts, so that their load is uneven.
"""

from pathlib import Path

import torch

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_config.registry import lfm2_moe

SEED = 20251021

ROUTER_BIAS = 0.3
"""Bias of the most preferred expert, in units of the sigmoids. The least preferred has -0.3."""

_FULL: dict[str, object] = {
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "vocab_size": 65536,
    "max_position_embeddings": 128_000,
    "full_attn_idxs": [2, 6, 10, 14, 18, 21],
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
}

SIZES: dict[str, dict[str, object]] = {
    "full": _FULL,
    "small": _FULL
    | {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 448,
        "moe_intermediate_size": 112,
        "vocab_size": 4096,
    },
}
SIZES["tiny"] = SIZES["small"] | {
    "num_hidden_layers": 6,
    "full_attn_idxs": [2, 5],
    "vocab_size": 512,
}


def make_model_config(size: str) -> ModelConfig:
    """Return the configuration of the whole model. `size` is a key in SIZES."""
    return lfm2_moe(HFConfig(Path(f"{size}/config.json"), SIZES[size]))


def make_prompts(model_config: ModelConfig, count: int, tokens: int) -> torch.Tensor:
    """Return random token ids [count, tokens]."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, model_config.vocab, (count, tokens), generator=generator)


class SeededWeights:
    """Prepared tensors on the device, named as in `ullage_engine.model_loader.tensor_plan`."""

    def __init__(self, whole: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._model_config = whole
        self._dtype = dtype
        self._device = device

    def ends(self) -> dict[str, torch.Tensor]:
        """Create the tensors before the first layer and after the last layer."""
        model_config = self._model_config
        random = self._source(0)
        return {
            "embedding": random(model_config.vocab, model_config.hidden),
            "norm": 1 + random(model_config.hidden),
        }

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Create the tensors of one layer. This object does not keep them."""
        model_config = self._model_config
        random = self._source(index + 1)
        spec = model_config.layers[index]
        hidden = model_config.hidden
        # As in GPT-2, so that the residual stream does not grow with the layers.
        down_scale = (2 * model_config.num_layers) ** -0.5

        tensors = {
            "mixer_norm": 1 + random(hidden),
            "mlp_norm": 1 + random(hidden),
            **self._mixer(spec, random, down_scale),
            **self._mlp(spec, random, down_scale),
        }
        return {f"layers.{index}.{name}": tensor for name, tensor in tensors.items()}

    def _mixer(
        self, spec: LayerSpec, random: "_Source", down_scale: float
    ) -> dict[str, torch.Tensor]:
        model_config = self._model_config
        hidden = model_config.hidden
        if spec.mixer == "conv":
            return {
                "conv_in": random(3 * hidden, hidden),
                "conv": random(hidden, model_config.conv_kernel),
                "conv_out": random(hidden, hidden).mul_(down_scale),
            }
        return {
            "qkv": random(model_config.qkv_width, hidden),
            "output": random(hidden, model_config.query_width).mul_(down_scale),
            "q_norm": 1 + random(model_config.head_dim),
            "k_norm": 1 + random(model_config.head_dim),
        }

    def _mlp(
        self, spec: LayerSpec, random: "_Source", down_scale: float
    ) -> dict[str, torch.Tensor]:
        hidden = self._model_config.hidden
        experts = self._model_config.experts
        if spec.feed_forward == "dense" or experts is None:
            width = self._model_config.intermediate
            return {
                "gate_up": random(2 * width, hidden),
                "down": random(hidden, width).mul_(down_scale),
            }
        count = experts.num_experts
        width = experts.intermediate
        return {
            "router": random(count, hidden),
            "router_bias": random.shuffled(torch.linspace(-ROUTER_BIAS, ROUTER_BIAS, count)),
            "experts_gate_up": random(count, 2 * width, hidden),
            "experts_down": random(count, hidden, width).mul_(down_scale),
        }

    def _source(self, seed: int) -> "_Source":
        return _Source(SEED + seed, self._dtype, self._device)


class _Source:
    """A source of random values that are the same for a seed on one kind of device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return normally distributed rows with norms of about 1, so matmuls keep the scale."""
        numbers = torch.randn(shape, generator=self._generator, device=self._device)
        return numbers.mul_(shape[-1] ** -0.5).to(self._dtype)

    def shuffled(self, values: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(values), generator=self._generator, device=self._device)
        return values.to(self._device)[order]
