"""What GGUF calls the tensors that Hugging Face's checkpoints have."""

import re

COMMON = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

LFM2 = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}

GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}

NAMES = COMMON | LFM2
"""Hugging Face's names, without layer and suffix, to GGUF's."""

BY_ARCHITECTURE = {"gpt-oss": NAMES | GPT_OSS}

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Stacked, an expert each."""

_HUGGING_FACE = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:feed_forward\.experts\.(?P<expert>\d+)\.)?"
    r"(?P<part>.+?)(?P<suffix>\.weight|\.bias)?"
)


def gguf_name(architecture: str, name: str) -> tuple[str, int | None]:
    """GGUF's name of a tensor that Hugging Face calls `name`, and which expert's of it."""
    match = _HUGGING_FACE.fullmatch(name)
    assert match is not None, name
    prefix = "" if match["layer"] is None else f"blk.{match['layer']}."
    part = BY_ARCHITECTURE.get(architecture, NAMES)[match["part"]]
    expert = None if match["expert"] is None else int(match["expert"])
    return f"{prefix}{part}{match['suffix'] or ''}", expert


def is_known(architecture: str, name: str) -> bool:
    """Whether a layer reads the tensor that GGUF calls `name`."""
    parts = {*BY_ARCHITECTURE.get(architecture, NAMES).values(), *EXPERTS}
    whole = "|".join(re.escape(part) for part in parts if part.endswith((".bias", ".weight")))
    weights = "|".join(re.escape(part) for part in [*parts, "rope_freqs"])
    biased = r"attn_(q|k|v|output)|ffn_(gate|up|down)_exps|ffn_gate_inp"
    suffixes = rf"({weights})\.weight"
    if architecture == "gpt-oss":
        suffixes += rf"|({biased})\.bias"
    return re.fullmatch(rf"(blk\.\d+\.)?({whole}|{suffixes})", name) is not None
