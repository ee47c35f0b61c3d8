"""Collects everything that can change even a single bit of a vLLM engine's answers.

This module does not import vLLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ullage_common.config.engine import EngineConfig
from ullage_engine.model_config.hf_config import read_json
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.worker.fingerprint import digest_of_json, yes_or_no

_CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json")
"""Model files that describe the model's dimensions and the quantisation of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Properties of the installed vLLM and its environment that may affect its answers."""

    version: str
    device: str
    processor: str
    dtype: str
    """Dtype of the weights and activations."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """vLLM environment variables that are set and may influence the choice of kernels."""


def engine_facts(
    config: EngineConfig, files: ModelFiles, weights: str, backend: Backend
) -> dict[str, str]:
    """Return everything that determines the exact bits of KV and answers, except LoRA adapters.

    Args:
        config: the engine's configuration.
        files: the model's files.
        weights: digest of the weight files.
        backend: the installed vLLM.
    """
    model = config.model
    ranks = config.parallelism
    facts = {
        "engine": "vllm",
        "weights": weights[:32],
        "model_config": _config_digest(files),
        "dtype": backend.dtype,
        "kv_dtype": model.kv_dtype,
        "quantization": model.quantization,
        "deterministic": yes_or_no(model.deterministic),
        # Some model families derive positions from the context length.
        "max_model_len": str(model.max_model_len or "auto"),
        "ranks": f"tensor {ranks.tensor}, pipeline {ranks.pipeline}",
        "device": backend.device,
        "computed_by": "vllm",
        "vllm": backend.version,
        # Any of these arguments may change how vLLM computes.
        "args": json.dumps(config.vllm.args, sort_keys=True, separators=(",", ":")),
        "torch": str(torch.__version__),
        "processor": backend.processor,
    }
    if backend.device == "cpu":
        facts["threads"] = str(torch.get_num_threads())
    if backend.environment:
        facts["environment"] = json.dumps(dict(backend.environment), sort_keys=True)
    return facts


def _config_digest(files: ModelFiles) -> str:
    """Return a digest of the files that describe a model's dimensions and quantisation.

    A GGUF file contains its own description, so the digest of its weights already covers it.
    """
    paths = [files.path / name for name in _CONFIG_FILES] if files.format == "directory" else []
    return digest_of_json({path.name: read_json(path) for path in paths if path.is_file()})
