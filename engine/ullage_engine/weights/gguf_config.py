"""GGUF's metadata in the words of Hugging Face's config.json, so that one reader serves both."""

from pathlib import Path

from gguf import GGUFReader

from ullage_engine.models.config import Json, ModelConfig
from ullage_engine.weights.errors import WeightsError

MODEL_TYPES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "gpt-oss": "gpt_oss",
}
"""GGUF's architectures to Hugging Face's."""

_SIGMOID = 2
"""llama.cpp's number for how LFM2 scores experts."""

Keys = dict[str, str]

_COMMON: Keys = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "sliding_window": "attention.sliding_window",
}


class GgufMetadata:
    """The metadata of one file; errors name the file and the key."""

    def __init__(self, path: Path, file: GGUFReader) -> None:
        self._path = path
        self._fields = file.fields
        architecture = self.value("general.architecture")
        if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
            raise WeightsError(
                f"{path}: architecture {architecture!r} is not supported; "
                f"use a model of {', '.join(sorted(MODEL_TYPES))}"
            )
        self.architecture = architecture

    def value(self, key: str) -> object:
        """One value; None where there is none."""
        field = self._fields.get(key)
        contents: object = None if field is None else field.contents()
        return contents

    def eos_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({value for key in keys if isinstance(value := self.value(key), int)})

    def config(self, vocab: int, tied: bool) -> ModelConfig:
        """The file's architecture as a config.json would describe it."""
        values: Json = {name: self._own(key) for name, key in _COMMON.items()}
        for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"):
            if values[name] is None:
                raise self._missing(_COMMON[name])
        values |= {
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "rope_scaling": self._rope_scaling(),
            # llama.cpp stores the width itself.
            "block_auto_adjust_ff_dim": False,
        }
        if self.architecture == "gpt-oss":
            values["intermediate_size"] = self._own("expert_feed_forward_length")
        self._check_values(values)
        return ModelConfig(self._path, values | self._kv_heads())

    def _own(self, key: str) -> object:
        return self.value(f"{self.architecture}.{key}")

    def _missing(self, key: str) -> WeightsError:
        key = f"{self.architecture}.{key}"
        return WeightsError(f"{self._path}: metadata {key!r} is missing; convert the file again")

    def _kv_heads(self) -> Json:
        """KV heads, and which layers attend: those of a list that have any."""
        heads = self._own("attention.head_count_kv")
        if not isinstance(heads, list):
            return {"num_key_value_heads": heads}
        kinds = ["full_attention" if count else "conv" for count in heads]
        present = sorted({count for count in heads if count})
        if len(present) != 1:
            raise WeightsError(
                f"{self._path}: layers with {present} KV heads, but only one number of them is "
                "supported; use another model"
            )
        return {"num_key_value_heads": present[0], "layer_types": kinds}

    def _rope_scaling(self) -> Json | None:
        kind = self._own("rope.scaling.type")
        if kind in (None, "none"):
            return None
        if kind != "yarn":
            raise WeightsError(
                f"{self._path}: rope scaling {kind!r} is not supported; use a model without it"
            )
        return {
            "rope_type": "yarn",
            "factor": self._own("rope.scaling.factor"),
            "original_max_position_embeddings": self._own("rope.scaling.original_context_length"),
            "truncate": False,
        }

    def _check_values(self, values: Json) -> None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        assert isinstance(hidden, int) and isinstance(heads, int)
        head_dim = values["head_dim"] or hidden // heads
        self._require("rope.dimension_count", head_dim)
        self._require("attention.value_length", head_dim)
        if self.architecture in ("llama", "qwen3", "lfm2"):
            self._require("expert_count", 0)
        if self.architecture == "lfm2moe":
            self._require("expert_gating_func", _SIGMOID)

    def _require(self, key: str, expected: object) -> None:
        value = self._own(key)
        if value not in (None, expected):
            raise WeightsError(
                f"{self._path}: metadata '{self.architecture}.{key}' is {value}, but only "
                f"{expected} is supported; use another model"
            )
