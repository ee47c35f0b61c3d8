"""What a quantization_config says of int8 and FP8 matrices; what it says that is not computed here
is refused by name, because the numbers would mean something else."""

from collections.abc import Iterable
from dataclasses import dataclass

from ullage_engine.models.config import ModelConfig
from ullage_engine.weights.errors import WeightsError

COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized")

_SETTINGS = frozenset(
    {
        "config_groups",
        "format",
        "global_compression_ratio",
        "ignore",
        "kv_cache_scheme",
        "quant_method",
        "quantization_status",
        "sparsity_config",
        "transform_config",
        "version",
    }
)
_GROUP = frozenset({"format", "input_activations", "output_activations", "targets", "weights"})
_NUMBERS = frozenset(
    {
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    }
)
_FP8_SETTINGS = frozenset(
    {
        "activation_scheme",
        "fmt",
        "ignored_layers",
        "modules_to_not_convert",
        "quant_method",
        "scale_fmt",
        "weight_block_size",
    }
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of one model are stored."""

    types: frozenset[str]
    """int, float: what weights may be."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale, where neither a row nor the tensor has one."""
    is_symmetric: bool = True
    """Without zero points."""
    rounds_activations: bool = False
    """To int8, row by row. FP8 activations stay in the computing type, which rounds them less than
    the model was made for."""


def read_scheme(config: ModelConfig) -> Scheme:
    """Of `quant_method` fp8 or compressed-tensors.

    Raises:
        WeightsError: a setting has a value that is not supported, or is not known.
    """
    return _fp8(config) if config.get("quant_method") == "fp8" else _compressed(config)


def _fp8(config: ModelConfig) -> Scheme:
    _refuse_unknown(config, "", _FP8_SETTINGS)
    _one_of(config, "", "activation_scheme", "dynamic", "static", None)
    _one_of(config, "", "fmt", "e4m3", None)
    _one_of(config, "", "scale_fmt", "float", "ue8m0", None)
    return Scheme(frozenset({"float"}), _block(config, "", "weight_block_size"))


def _compressed(config: ModelConfig) -> Scheme:
    _refuse_unknown(config, "", _SETTINGS)
    _one_of(config, "", "format", *COMPRESSED)
    _one_of(config, "", "kv_cache_scheme", None)
    _one_of(config, "", "transform_config", None, {})
    if config.get("sparsity_config") not in (None, {}):
        _one_of(config.section("sparsity_config"), "sparsity_config.", "format", "dense", None)
    groups = config.section("config_groups")
    schemes = [_group(groups, name) for name in groups.values]
    if len(set(schemes)) != 1:
        raise WeightsError(
            f"{config.path}: quantization_config.config_groups has {len(set(schemes))} different "
            "schemes; use a model with one"
        )
    return schemes[0]


def _group(groups: ModelConfig, name: str) -> Scheme:
    group, where = groups.section(name), f"config_groups.{name}."
    _refuse_unknown(group, where, _GROUP)
    _one_of(group, where, "output_activations", None)
    _one_of(group, where, "format", *COMPRESSED, None)
    weights, inside = group.section("weights"), f"{where}weights."
    _refuse_unknown(weights, inside, _NUMBERS)
    _one_of(weights, inside, "num_bits", 8)
    _one_of(weights, inside, "type", "int", "float", None)
    _one_of(weights, inside, "strategy", "tensor", "channel", "block", None)
    _one_of(weights, inside, "dynamic", False, None)
    _one_of(weights, inside, "actorder", None)
    _one_of(weights, inside, "group_size", None, -1)
    _one_of(weights, inside, "symmetric", True, False, None)
    type = weights.get("type", "int")
    rounds = _rounds(group, where, type)
    is_symmetric = weights.get("symmetric", True) is True
    if not is_symmetric and (rounds or type == "float"):
        _one_of(weights, inside, "symmetric", True)
    block = _block(weights, inside, "block_structure")
    return Scheme(frozenset({str(type)}), block, is_symmetric, rounds)


def _rounds(group: ModelConfig, where: str, type: object) -> bool:
    """Whether int8 products are to round activations."""
    activations, inside = group.section("input_activations"), f"{where}input_activations."
    if not activations.values:
        return False
    _refuse_unknown(activations, inside, _NUMBERS)
    _one_of(activations, inside, "num_bits", 8)
    _one_of(activations, inside, "type", type, None)
    if type == "float":
        return False
    _one_of(activations, inside, "strategy", "token")
    _one_of(activations, inside, "dynamic", True)
    _one_of(activations, inside, "symmetric", True, None)
    return True


def _block(config: ModelConfig, where: str, key: str) -> tuple[int, int]:
    sizes = config.list(key) or [128, 128]
    if len(sizes) != 2 or not all(isinstance(each, int) and each > 0 for each in sizes):
        raise WeightsError(
            f"{config.path}: quantization_config.{where}{key} is {sizes!r}, not two whole numbers"
        )
    height, width = (each for each in sizes if isinstance(each, int))
    return height, width


def _one_of(config: ModelConfig, where: str, key: str, *values: object) -> None:
    value = config.get(key)
    if not any(value == each and isinstance(value, type(each)) for each in values):
        known = ", ".join("none" if each is None else repr(each) for each in values)
        raise WeightsError(
            f"{config.path}: quantization_config.{where}{key} is {value!r}; "
            f"use a model with one of {known}"
        )


def _refuse_unknown(config: ModelConfig, where: str, known: Iterable[str]) -> None:
    for key, value in config.values.items():
        if key not in known and value is not None:
            raise WeightsError(
                f"{config.path}: quantization_config.{where}{key} {value!r} is not known here, and "
                "may change what the numbers mean; use another model"
            )
