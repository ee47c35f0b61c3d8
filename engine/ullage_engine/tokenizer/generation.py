"""Sampling parameters that a model's generation_config.json or GGUF metadata recommends.

Every key is either honoured, ignored because it does not affect sampling, or refused with an error
that states its name and value. Silently ignoring a relevant key would produce answers that the
model's authors did not intend.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ullage_common.wire.limits import SAMPLING_RANGES

Values = Mapping[str, object]
SamplingDefaults = Mapping[str, Any]
"""Recommended sampling parameters, by field name of `ullage.inference.v1.SamplingParams`."""

_REMEDY = "set model.generationDefaults to false to serve without its recommendations"

_TAKEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

_HARMLESS = frozenset(
    {
        # Tokens, which are read elsewhere or not used by servers.
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "assistant_token_id",
        "user_token_id",
        # Lengths of answers, which requests and the service limit.
        "max_length",
        "max_new_tokens",
        # The form of answers and their computation.
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "chat_format",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "is_assistant",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "max_window_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "return_dict_in_generate",
        "return_legacy_cache",
        "speculation_type",
        "target_lookbehind",
        "trust_remote_code",
        "use_cache",
        "use_mtp",
        # Parameters of beam search, for which only a request can ask.
        "early_stopping",
        "length_penalty",
        # Notes of the library that wrote the file.
        "_commit_hash",
        "_from_model_config",
        "_name_or_path",
        "dtype",
        "model_type",
        "output_router_logits",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    }
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "typical_p": (1.0,),
        "epsilon_cutoff": (0.0,),
        "eta_cutoff": (0.0,),
        "top_h": (),
        "diversity_penalty": (0.0,),
        "encoder_repetition_penalty": (1.0,),
        "encoder_no_repeat_ngram_size": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beams": (1,),
        "num_beam_groups": (1,),
        "penalty_alpha": (0.0,),
        "dola_layers": (),
        "guidance_scale": (1.0,),
        "bad_words_ids": ([],),
        "force_words_ids": ([],),
        "constraints": ([],),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "exponential_decay_length_penalty": (),
        "suppress_tokens": ([],),
        "begin_suppress_tokens": ([],),
        "sequence_bias": ({}, []),
        "generation_kwargs": ({},),
        "max_time": (),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "stop_strings": ([],),
        "token_healing": (False,),
        "watermarking_config": (),
    }
)
"""Maps unsupported keys to the values at which they have no effect. Null never has an effect."""

_GGUF_PREFIX = "general.sampling."
_GGUF_TAKEN: Mapping[str, str] = MappingProxyType(
    {
        "temp": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)
_GGUF_HARMLESS = frozenset({"sequence", "penalty_last_n"})
"""GGUF keys that are ignored.

The order of samplers is fixed, and penalties always cover the whole text.
"""
_GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "mirostat": (0,),
        "xtc_probability": (0.0,),
    }
)
_GGUF_DEPENDENT: Mapping[str, str] = MappingProxyType(
    {
        "mirostat_eta": "mirostat",
        "mirostat_tau": "mirostat",
        "xtc_threshold": "xtc_probability",
    }
)
"""Maps each ignored key to the key that enables the feature that it configures.

Ignoring them is safe, because files that enable the feature are refused.
"""


class GenerationError(Exception):
    """Raised if a sampling parameter that the model's files recommend is not supported.

    The message names the key, the value and the remedy.
    """


def sampling_defaults(config: Values) -> SamplingDefaults:
    """Return the sampling parameters that a generation_config.json recommends.

    A file with `do_sample: false` recommends greedy sampling, even if it has a temperature.

    Raises:
        GenerationError: if a value is not valid or requires an unsupported feature.
    """
    defaults: dict[str, float | int] = {}
    for key, value in config.items():
        if value is None or key in _HARMLESS:
            continue
        if key in _TAKEN:
            defaults[key] = _number(key, value)
        elif key == "do_sample":
            if not isinstance(value, bool):
                raise GenerationError(f"{key} is {value!r}, not true or false; {_REMEDY}")
        elif key in _NEUTRAL:
            _check_neutral(key, value, _NEUTRAL[key])
        else:
            raise GenerationError(f"{key} is {value!r}, and that key is not known; {_REMEDY}")

    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def gguf_sampling_defaults(metadata: Values) -> SamplingDefaults:
    """Return the sampling parameters that GGUF metadata recommends under `general.sampling`.

    Raises:
        GenerationError: if a value is not valid or requires an unsupported feature.
    """
    defaults: dict[str, float | int] = {}
    for key, value in metadata.items():
        name = key.removeprefix(_GGUF_PREFIX)
        if name == key or name in _GGUF_HARMLESS or name in _GGUF_DEPENDENT:
            continue
        if name in _GGUF_TAKEN:
            defaults[_GGUF_TAKEN[name]] = _number(_GGUF_TAKEN[name], value, key)
        elif name in _GGUF_NEUTRAL:
            _check_neutral(key, value, _GGUF_NEUTRAL[name])
        else:
            raise GenerationError(f"{key} is {value!r}, and that key is not known; {_REMEDY}")
    return defaults


def _check_neutral(key: str, value: object, neutral: tuple[object, ...]) -> None:
    if value not in neutral:
        raise GenerationError(f"{key} is {value!r}, which is not supported; {_REMEDY}")


def _number(field: str, value: object, key: str = "") -> float | int:
    """Check that requests may use a recommended value, and return the value as a number."""
    key = key or field
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GenerationError(f"{key} is {value!r}, not a number; {_REMEDY}")
    if field == "top_k":
        if value != int(value):
            raise GenerationError(f"{key} is {value!r}, not a whole number; {_REMEDY}")
        # -1 is another way to keep all tokens.
        return max(int(value), 0)
    allowed = SAMPLING_RANGES[field]
    if value not in allowed:
        raise GenerationError(f"{key} is {value!r}; possible: {allowed}; {_REMEDY}")
    return float(value)
