"""The arguments of `LLM`, by vLLM's names, as fields of an LLMService."""

from collections.abc import Mapping
from typing import Any

from ullage_cli.offline_manifest import offline_manifest
from ullage_operator.api.errors import InvalidManifest, LocalFailure
from ullage_operator.api.overlay import laid_over
from ullage_operator.api.parsing import parse
from ullage_operator.api.spec import Service

_DTYPES = {
    "auto": "Auto",
    "half": "Float16",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float": "Float32",
    "float32": "Float32",
}
_QUANTIZATIONS = {
    "auto": "Auto",
    "none": "None",
    "int8": "Int8",
    "int4": "Int4",
    "fp8": "FP8",
    "w8a8": "W8A8",
    # Formats of checkpoints, which the engine reads from their files.
    **dict.fromkeys(("gguf", "awq", "awq_marlin", "gptq", "gptq_marlin"), "Auto"),
    **dict.fromkeys(("compressed-tensors", "mxfp4"), "Auto"),
}
_KV_DTYPES = {"auto": "Auto", "fp8": "FP8", "fp8_e4m3": "FP8"}
_DEVICES = {"auto": "Auto", "cuda": "CUDA", "cpu": "CPU"}
_ENGINES = {"auto": "Auto", "native": "Native", "vllm": "VLLM"}
_GENERATION_CONFIGS = {"auto": True, "vllm": False}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    # No answer depends on whether steps are recorded as CUDA graphs.
    "enforce_eager": (False, True),
    "enable_lora": (False,),
    "skip_tokenizer_init": (False,),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),
    "disable_log_stats": (True, False),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
}
"""Values of other arguments of vLLM that change nothing here. None changes nothing either."""

_REMEDIES = {
    "tokenizer": "leave it out: the tokenizer is the model's own",
    "trust_remote_code": "leave it out: no code of a model is run",
    "enable_lora": "serve adapters with spec.adapters, and ask the service over HTTP",
    "lora_request": "serve adapters with spec.adapters, and ask the service over HTTP",
    "priority": "put urgent prompts first: they are sent in the order of the list",
    "chat_template": "render the prompts yourself, and give their texts to generate",
    "prompt_token_ids": "give generate the prompt {'prompt_token_ids': ids}",
    "swap_space": "set spec={'memory': {'hostKV': '4Gi'}} for host memory of preempted sequences",
    "cpu_offload_gb": "take a smaller quantization, or a larger tensor_parallel_size",
    "max_num_batched_tokens": "set spec={'batching': {'prefillChunkTokens': N}}",
    "download_dir": "set the environment variable HF_HOME",
    "hf_token": "set the environment variable HF_TOKEN",
    "runner": "serve embeddings with ullage up, and ask /v1/embeddings",
    "task": "serve embeddings with ullage up, and ask /v1/embeddings",
}
_OTHER = (
    "leave it out; spec takes any field of an LLMService, as spec={{'vllm': {{'args': {{{name!r}: "
    "...}}}}}} for an argument of vLLM with engine='vllm'"
)


def manifest_of(
    model: str,
    *,
    revision: str | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    dtype: Any = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_prefix_caching: bool | None = None,
    enable_chunked_prefill: bool | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    generation_config: str = "auto",
    served_model_name: str | None = None,
    device: str = "auto",
    engine: str = "auto",
    spec: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the manifest of the service that computes for an `LLM`. See there for the arguments.

    Raises:
        ValueError: an argument has an invalid value, or is one that Ullage does not support.
    """
    refuse_others(others)
    pool = {
        "gpus": tensor_parallel_size * pipeline_parallel_size,
        "parallelism": {"tensor": tensor_parallel_size, "pipeline": pipeline_parallel_size},
    }
    model_fields = {
        "dtype": _choice("dtype", str(dtype).removeprefix("torch."), _DTYPES),
        "quantization": _choice("quantization", quantization or "auto", _QUANTIZATIONS),
        "kvDtype": _choice("kv_cache_dtype", kv_cache_dtype, _KV_DTYPES),
        "maxModelLen": max_model_len,
        "generationDefaults": _choice("generation_config", generation_config, _GENERATION_CONFIGS),
    }
    memory = {
        "thresholdPercent": _percent(gpu_memory_utilization),
        "maxKV": kv_cache_memory_bytes,
        "prefixCache": enable_prefix_caching,
    }
    batching = {
        "maxSequences": max_num_seqs,
        "prefillChunkTokens": 0 if enable_chunked_prefill is False else None,
        "numSpeculativeTokens": _draft_tokens(speculative_config),
    }
    asked = {
        "model": _given(model_fields),
        "device": _choice("device", device, _DEVICES),
        "engine": _choice("engine", engine, _ENGINES),
        "replicas": data_parallel_size,
        "pools": {"single": pool},
        "memory": _given(memory),
        "batching": _given(batching),
    }
    try:
        return offline_manifest(
            model,
            name=served_model_name or "",
            revision=revision or "",
            spec=laid_over(asked, dict(spec or {})),
        )
    except LocalFailure as error:
        raise ValueError(str(error)) from None


def service_of(manifest: Mapping[str, Any]) -> Service:
    """Return the service that a manifest defines, after all checks of its fields.

    Raises:
        ValueError: a field is invalid. The error names all such fields.
    """
    try:
        return parse(manifest)
    except InvalidManifest as error:
        raise ValueError(str(error)) from None


def _refusal(name: str, value: Any) -> ValueError:
    """Return the error for an argument that Ullage does not support."""
    remedy = _REMEDIES.get(name) or _OTHER.format(name=name)
    return ValueError(f"{name}={value!r} is not supported by ullage.LLM; {remedy}")


def refuse_others(others: Mapping[str, Any]) -> None:
    """Raise an error if an argument would change something, and is not supported.

    Raises:
        ValueError: an argument is not supported.
    """
    for name, value in others.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise _refusal(name, value)


def _choice(name: str, value: str, choices: Mapping[str, Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(choices)}")
    return choices[value]


def _percent(utilization: float | None) -> int | None:
    """Return a share of the device's memory as whole percent, rounded down."""
    if utilization is None:
        return None
    # A rounding error of a float must not cost a percent: 0.29 * 100 is 28.999999999999996.
    percent = int(utilization * 100 + 1e-6)
    if not 1 <= percent <= 100:
        raise ValueError(f"gpu_memory_utilization is {utilization}; use 0.01 to 1.0, such as 0.9")
    return percent


def _draft_tokens(config: Mapping[str, Any] | None) -> int | None:
    """Return the number of draft tokens of prompt lookup, the only kind of speculation."""
    if config is None:
        return None
    method = config.get("method")
    unknown = sorted({*config} - {"method", "num_speculative_tokens"})
    if method != "ngram" or unknown or "num_speculative_tokens" not in config:
        raise ValueError(
            f"speculative_config is {dict(config)!r}; use "
            "{'method': 'ngram', 'num_speculative_tokens': N}"
        )
    return int(config["num_speculative_tokens"])


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
