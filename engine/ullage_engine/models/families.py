"""The models that are served, by the name their configuration gives them."""

from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.models.gpt_oss import gpt_oss
from ullage_engine.models.lfm2 import lfm2, lfm2_moe
from ullage_engine.models.llama import llama, qwen3
from ullage_engine.models.names import GPT_OSS, LFM2, LLAMA, Names
from ullage_engine.weights.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of one architecture are read."""

    geometry: Callable[[ModelConfig, list[int]], ModelGeometry]
    names: Names


FAMILIES = {
    "llama": Family(llama, LLAMA),
    "qwen3": Family(qwen3, LLAMA),
    "lfm2": Family(lfm2, LFM2),
    "lfm2_moe": Family(lfm2_moe, LFM2),
    "gpt_oss": Family(gpt_oss, GPT_OSS),
}


def read_model_config(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """The geometry that a config.json describes.

    Raises:
        WeightsError: its model_type is unknown, or a value is missing or not supported.
    """
    name = config.values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise WeightsError(
            f"{config.path}: model_type {name!r} is not supported; "
            f"use a model of {', '.join(sorted(FAMILIES))}"
        )
    return family.geometry(config, eos_token_ids)
