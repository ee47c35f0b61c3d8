"""What checkpoints call the tensors of a layer."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Names:
    """Hugging Face's names, without `model.layers.N.` and `.weight`."""

    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    conv: str = "conv.conv"
    conv_in: str = "conv.in_proj"
    conv_out: str = "conv.out_proj"
    router: str = "feed_forward.gate"
    router_bias: str = "feed_forward.expert_bias"
    """With its suffix."""
    expert: str = "feed_forward.experts.{}."
    """Before an expert's `gate`, `up` and `down`, of which the last parts are used; empty where
    all experts are one tensor."""
    norm: str = "model.norm"
    """After the last layer; whole but for `.weight`."""


LLAMA = Names()

LFM2 = replace(
    LLAMA,
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    norm="model.embedding_norm",
)

GPT_OSS = replace(LLAMA, router="mlp.router", router_bias="mlp.router.bias", expert="")
