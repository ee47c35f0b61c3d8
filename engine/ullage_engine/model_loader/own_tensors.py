"""Handles checkpoint tensors that the configuration does not account for.

A configuration may tie the output projection to the embedding even though the files contain a
separate projection. The files may also contain tensors, such as biases, that no layer of the model
family reads. Ignoring such tensors could change answers. The engine therefore uses the separate
projection, and refuses models with unread tensors.
"""

import logging
import re
from collections.abc import Iterable
from typing import Protocol

import msgspec
import torch

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.files import HEAD, Contradictions
from ullage_engine.model_loader.tensor_plan import EMBEDDING, plan_tensors
from ullage_engine.protocol.errors import WeightsError

log = logging.getLogger("ullage.engine.weights")

_ROWS_AT_ONCE = 4096
"""Number of rows to compare at a time, to limit memory use."""

_STORED = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_zero", "weight_shape", "weight_g_idx", "input_scale"),
)
"""Name suffixes of the tensors in which checkpoints store quantised matrices."""

_HARMLESS = re.compile(
    r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias|k_scale|v_scale|kv_scale"
    r"|q_scale|prob_scale|output_scale|input_zero_point)"
)
"""Tensors that can be ignored safely: tables that the engine computes itself, and scales of
activations and KV, for which the engine chooses the dtypes itself."""


class Tensors(Protocol):
    """Protocol for the subset of a checkpoint reader's interface that this module uses."""

    @property
    def names(self) -> list[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor: ...


def with_own_head(model_config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """Turn off weight tying in the configuration if the files have a different output projection.

    An output projection that differs from the embedding is used even if the configuration ties the
    two, as in transformers. In all other cases, `model_config` is returned unchanged.
    """
    heads = [
        name for name in tensors.names if name.startswith("lm_head.") and not name.endswith(".bias")
    ]
    if not model_config.tied or not heads or EMBEDDING not in tensors:
        return model_config
    if heads == [HEAD] and _are_equal(tensors, HEAD, EMBEDDING):
        return model_config
    log.warning(
        "config.json sets tie_word_embeddings, but %s differs from the embedding, and is used; set "
        "tie_word_embeddings to false",
        heads[0],
    )
    return msgspec.structs.replace(model_config, tied=False)


def check_tensors(model_config: ModelConfig, tensors: Tensors, config: HFConfig) -> None:
    """Refuse a checkpoint with tensors that belong to the model's layers but are never read.

    Tensors of layers beyond the configured number are ignored. All-zero biases, which some
    quantisers write, are ignored too.

    Raises:
        WeightsError: a tensor is not read, and unknown tensors are not allowed.
    """
    read = _read_names(model_config)
    stems = _stems(read)
    unread = [
        name
        for name in tensors.names
        if name not in read
        and not _HARMLESS.fullmatch(name)
        and not _is_stored_part(name, stems)
        and _is_computed_with(name, model_config)
        and not _is_zero_bias(tensors, name)
    ]
    if not unread:
        return
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    if config.allows_unknown:
        log.warning(
            "%s: tensor %s%s is not read, as spec.model.allowUnknownConfig allows; answers are "
            "wrong if the model depends on it",
            config.path.parent,
            unread[0],
            more,
        )
        return
    raise WeightsError(
        f"{config.path.parent}: tensor {unread[0]!r}{more} is not read by a model of "
        f"{model_config.architecture}, and may change answers; use another model or, if the model "
        "does not depend on it, set spec.model.allowUnknownConfig: true "
        "(model.allow_unknown_config)"
    )


def check_contradictions(model_config: ModelConfig, found: Contradictions) -> None:
    """Refuse a checkpoint whose files disagree about a tensor that the model uses.

    Raises:
        WeightsError: the index or the files contradict each other about a tensor.
    """
    read = _read_names(model_config)
    stems = _stems(read)
    for name, reason in (found.missing | found.ambiguous).items():
        if name in read or _is_stored_part(name, stems):
            raise WeightsError(reason)


def _read_names(model_config: ModelConfig) -> set[str]:
    """Return the names that a model's tensors have in unquantised checkpoints."""
    return {part.source for plan in plan_tensors(model_config) for part in plan.parts}


def _stems(names: set[str]) -> set[str]:
    return {name.removesuffix(".weight") for name in names}


def _are_equal(tensors: Tensors, name: str, other: str) -> bool:
    shape = tensors.shape(name)
    if shape != tensors.shape(other) or tensors.dtype(name) != tensors.dtype(other):
        return False
    starts: Iterable[int] = range(0, shape[0], _ROWS_AT_ONCE)
    return all(
        torch.equal(
            tensors.rows(name, start, start + _ROWS_AT_ONCE),
            tensors.rows(other, start, start + _ROWS_AT_ONCE),
        )
        for start in starts
    )


def _is_stored_part(name: str, stems: set[str]) -> bool:
    """Return whether a tensor stores part of a quantised matrix that the model uses."""
    stem, _, ending = name.rpartition(".")
    if ending in _STORED and stem in stems:
        return True
    # gpt-oss stores its experts as blocks and scales.
    return name.removesuffix("_blocks").removesuffix("_scales") in stems


def _is_computed_with(name: str, model_config: ModelConfig) -> bool:
    """Return whether a tensor belongs to a part of the model that is used in the computation.

    The used parts are the configured layers, the embedding, the final norm and the head.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        return int(layer[1]) < model_config.num_layers
    if model_config.tied and name == HEAD:
        return False
    return name.startswith(("model.", "lm_head."))


def _is_zero_bias(tensors: Tensors, name: str) -> bool:
    return name.endswith(".bias") and not tensors.rows(name, 0, tensors.shape(name)[0]).any()
