"""The models that are served, by the name their configuration gives them."""

from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import ModelGeometry, contradiction
from ullage_engine.models.gpt_oss import gpt_oss
from ullage_engine.models.lfm2 import lfm2, lfm2_moe
from ullage_engine.models.llama import llama, qwen3
from ullage_engine.models.names import GPT_OSS, LFM2, LLAMA, Names
from ullage_engine.weights.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of one architecture are read."""

    architecture: str
    """The class that a config.json's `architectures` names."""
    geometry: Callable[[ModelConfig, list[int]], ModelGeometry]
    names: Names


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama, LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", qwen3, LLAMA),
    "lfm2": Family("Lfm2ForCausalLM", lfm2, LFM2),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", lfm2_moe, LFM2),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, GPT_OSS),
}


def read_model_config(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """The geometry that a config.json describes.

    Raises:
        WeightsError: its architecture is unknown, or a value is missing or not supported.
    """
    name = config.values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise WeightsError(
            f"{config.path}: model_type {name!r} is not supported; "
            f"use a model of {', '.join(sorted(FAMILIES))}"
        )
    architectures = config.list("architectures")
    # A classifier or an embedder of the same family has other outputs.
    if architectures is not None and family.architecture not in architectures:
        known = ", ".join(sorted(each.architecture for each in FAMILIES.values()))
        raise WeightsError(
            f"{config.path}: architectures {architectures!r} are not supported; use a model of "
            f"{known}"
        )
    try:
        geometry = family.geometry(config, eos_token_ids)
    except (ArithmeticError, ValueError) as error:
        raise WeightsError(
            f"{config.path}: its numbers contradict one another ({error}); download the model again"
        ) from error
    wrong = contradiction(geometry)
    if wrong:
        raise WeightsError(f"{config.path}: {wrong}; download the model again")
    return geometry
