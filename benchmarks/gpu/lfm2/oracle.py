"""Runs transformers' LFM2 model with experts on the engine's own tensors."""

from collections.abc import Iterator

import torch

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.tensor_plan import plan_tensors

STACKED = {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}
"""Tensors that transformers also stores as one tensor for all experts."""


@torch.inference_mode()
def transformers_logits(loaded: LoadedModel, prompts: torch.Tensor) -> torch.Tensor:
    """Return the logits [samples, tokens, vocab] of prompts [samples, tokens].

    No second copy of the weights is needed, because the model is built without memory and then
    uses the engine's tensors.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeForCausalLM

    device = loaded.tensors["norm"].device
    config = _config(loaded.model_config)
    with torch.device("meta"):
        model = Lfm2MoeForCausalLM(config).eval()
    model.load_state_dict(dict(_state(loaded)), strict=True, assign=True)

    # No checkpoint has the rotary frequencies: recreate them, off the meta device.
    for name, module in list(model.model.named_children()):
        if hasattr(module, "inv_freq"):
            setattr(model.model, name, type(module)(config).to(device))
    logits: torch.Tensor = model(prompts.to(device), use_cache=False).logits
    return logits


def _config(own: ModelConfig) -> object:
    """Return transformers' configuration for the same model, with the simplest implementations."""
    from transformers import Lfm2MoeConfig

    assert own.experts is not None, "a mixture of experts"
    kinds = {"attention": "full_attention", "conv": "conv"}
    config = Lfm2MoeConfig(
        vocab_size=own.vocab,
        hidden_size=own.hidden,
        intermediate_size=own.intermediate,
        moe_intermediate_size=own.experts.intermediate,
        num_hidden_layers=own.num_layers,
        num_attention_heads=own.num_heads,
        num_key_value_heads=own.num_kv_heads,
        num_dense_layers=sum(each.feed_forward == "dense" for each in own.layers),
        num_experts=own.experts.num_experts,
        num_experts_per_tok=own.experts.experts_per_token,
        routed_scaling_factor=own.experts.scale,
        norm_topk_prob=own.experts.is_normalised,
        use_expert_bias=True,
        norm_eps=own.rms_eps,
        conv_L_cache=own.conv_kernel,
        max_position_embeddings=own.max_position,
        layer_types=[kinds[each.mixer] for each in own.layers],
        rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
        tie_word_embeddings=own.tied,
        attn_implementation="eager",
    )
    # Some versions group products only in bfloat16. The loop over experts is exact in all.
    config._experts_implementation = "eager"
    return config


def _state(loaded: LoadedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' tensors by name, as views of the engine's prepared tensors."""
    for plan in plan_tensors(loaded.model_config):
        tensor = loaded.tensors[plan.name]
        layer, _, kind = plan.name.rpartition(".")
        if kind in STACKED:
            yield f"model.{layer}.feed_forward.experts.{STACKED[kind]}", tensor
            continue
        first = 0
        for part in plan.parts:
            end = first + part.shape[0]
            yield part.source, tensor[first:end].view(part.shape)
            first = end
    yield "lm_head.weight", loaded.tensors["embedding"]
