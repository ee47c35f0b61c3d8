"""Rotary position embedding: turns any position scaling into frequency divisors and one factor.

Position p rotates pair i of a head by the angle p * theta ** (-2i / head_dim) / divisor_i. Cosine
and sine are multiplied by `Rope.scale`.
"""

import math
from dataclasses import dataclass

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.keys import Key, check_keys, fixed, harmless, read
from ullage_engine.protocol.errors import WeightsError

_FACTOR = read("factor by which the context was extended", "factor")
_ORIGINAL = read(
    "context of the model before it was extended; max_position_embeddings without it",
    "original_max_position_embeddings",
)
_ATTENTION_FACTOR = read("factor of cosine and sine", "attention_factor")

ROPE_KEYS: dict[str, Key] = {
    **read("type of the scaling; see below", "rope_type", "type"),
    **read("base of the frequencies", "rope_theta"),
    **fixed("share of a head that is rotated", (1.0,), "partial_rotary_factor"),
    **harmless("where the scaling comes from", "finetuned"),
}
"""Rules for the keys in `rope_parameters` and `rope_scaling` that apply to every scaling type."""

ROPE_TYPES: dict[str, dict[str, Key]] = {
    "default": {},
    "linear": _FACTOR,
    # It changes frequencies beyond max_position_embeddings only, which no request exceeds.
    "dynamic": _FACTOR,
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION_FACTOR,
        **fixed("factor of YaRN's factor, as other engines have it", (1.0,), "attn_factor"),
        **read("factors from which the factor of cosine and sine is made", "mscale"),
        **read("factors from which the factor of cosine and sine is made", "mscale_all_dim"),
        **read("bounds of the ramp, in turns", "beta_fast", "beta_slow"),
        **read("whether the ramp begins and ends at whole dimensions", "truncate"),
    },
    "llama3": {
        **_FACTOR,
        **_ORIGINAL,
        **read("bounds of the blend", "low_freq_factor", "high_freq_factor"),
    },
    "longrope": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION_FACTOR,
        **read("divisors of the frequencies within the original context", "short_factor"),
        **read(
            "divisors beyond it: where they differ, the longest sequence is the original context",
            "long_factor",
        ),
    },
}
"""Rules for the additional keys of each scaling type."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The constants of the rotary position embedding, as `ModelConfig` stores them."""

    theta: float
    factors: list[float] | None = None
    """Divisors of the rotary frequencies."""
    scale: float = 1.0
    """Factor by which cosine and sine are multiplied."""
    longest: int | None = None
    """Maximum sequence length in tokens for which the constants are valid, or None if unlimited."""


def read_rope(
    config: HFConfig, head_dim: int, theta: float = 10000.0, default: HFConfig | None = None
) -> Rope:
    """Read `rope_parameters` or `rope_scaling`, and `rope_theta`, as transformers does.

    Args:
        config: the config.json.
        head_dim: width of a head.
        theta: the family's default base of the rotary frequencies.
        default: the family's default position scaling.

    Raises:
        WeightsError: if a type or a value is not supported, or two sections contradict each other.
    """
    scaling, name = _section(config, theta, default)
    theta = scaling.float("rope_theta", config.float("rope_theta", theta))
    if theta <= 1:
        raise WeightsError(
            f"{config.path}: rope_theta is {theta!r}, not above 1; use another model"
        )
    _refuse_scaling_by_layer(scaling, name)

    kind = _kind(scaling)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise WeightsError(
            f"{config.path}: rope type {kind!r} is not supported; use a model of "
            f"{', '.join(ROPE_TYPES)}"
        )
    check_keys(scaling, ROPE_KEYS | ROPE_TYPES[kind], f"{name}.")

    if kind in ("default", "dynamic"):
        if kind == "dynamic":
            _factor(scaling)
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, [_factor(scaling)] * (head_dim // 2))
    original = _original(config, scaling)
    if kind == "llama3":
        return Rope(theta, _llama3_factors(scaling, theta, head_dim, original))
    if kind == "yarn":
        return _yarn(config, scaling, theta, head_dim, original)
    return _longrope(config, scaling, theta, head_dim, original)


def _section(config: HFConfig, theta: float, default: HFConfig | None) -> tuple[HFConfig, str]:
    """Return the section that defines position scaling, and the section's name.

    If both sections exist, `rope_scaling` is used. If neither exists, the family's default is used,
    if there is one.
    """
    modern = config.section("rope_parameters")
    old = config.section("rope_scaling")
    if not old.values:
        if config.get("rope_parameters") is None and default is not None:
            return default, "rope_parameters"
        return modern, "rope_parameters"
    if modern.values:
        _refuse_contradiction(config, modern, old, theta)
    return old, "rope_scaling"


def _refuse_contradiction(config: HFConfig, modern: HFConfig, old: HFConfig, theta: float) -> None:
    """Raise an error if `rope_parameters` contradicts `rope_scaling` or has additional settings."""
    base = config.float("rope_theta", theta)
    modern_base = modern.float("rope_theta", base)

    said = {
        key: value
        for key, value in modern.values.items()
        if key not in ("rope_theta", "rope_type", "type") and value != old.values.get(key)
    }
    if _kind(modern) not in ("default", _kind(old)):
        said["rope_type"] = _kind(modern)
    if modern_base != old.float("rope_theta", base):
        said["rope_theta"] = modern_base

    if said:
        key, value = next(iter(said.items()))
        raise WeightsError(
            f"{config.path}: rope_parameters.{key} is {value!r}, but rope_scaling, which overrides "
            "it, differs; remove rope_scaling and put its values into rope_parameters"
        )


def _refuse_scaling_by_layer(scaling: HFConfig, name: str) -> None:
    for key, value in scaling.values.items():
        if isinstance(value, dict):
            raise WeightsError(
                f"{scaling.path}: {name}.{key} is {value!r}, but all layers have to have the same "
                "positions; use another model"
            )


def _kind(scaling: HFConfig) -> object:
    return scaling.values.get("rope_type", scaling.values.get("type", "default"))


def _factor(scaling: HFConfig, default: float | None = None) -> float:
    return _positive(scaling, "factor", scaling.float("factor", default))


def _positive(scaling: HFConfig, name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise WeightsError(
            f"{scaling.path}: {name} of the rope scaling is {value!r}, not above 0; "
            "use another model"
        )
    return value


def _original(config: HFConfig, scaling: HFConfig) -> int:
    """Return the original context length, before position scaling extended it.

    A value at the top level of config.json takes precedence over the one in the position
    scaling section.
    """
    key = "original_max_position_embeddings"
    original = config.int(key, scaling.int(key, config.int("max_position_embeddings")))
    _positive(scaling, key, original)
    return original


def _llama3_factors(scaling: HFConfig, theta: float, head_dim: int, original: int) -> list[float]:
    """Return the frequency divisors of Llama 3.1, as in its reference implementation.

    The divisor is `factor` for long wavelengths and 1 for short ones. In between, it is
    interpolated.
    """
    factor = _factor(scaling)
    low = scaling.float("low_freq_factor")
    high = scaling.float("high_freq_factor")
    if high <= low:
        raise WeightsError(
            f"{scaling.path}: high_freq_factor {high!r} and low_freq_factor {low!r} of the rope "
            "scaling contradict each other, the first is the larger; download the model again"
        )

    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _yarn(config: HFConfig, scaling: HFConfig, theta: float, head_dim: int, original: int) -> Rope:
    """Return YaRN's constants (Peng et al., 2023).

    High frequencies, which complete many rotations within the original context, stay unchanged. Low
    frequencies are divided by `factor`. Those in between are interpolated with a linear ramp.
    """
    factor = _factor(scaling, config.int("max_position_embeddings") / original)
    # Zero means the default here, as in transformers.
    fast = scaling.float("beta_fast", 32.0) or 32.0
    slow = scaling.float("beta_slow", 1.0) or 1.0

    def dimension(turns: float) -> float:
        """Return which frequency completes `turns` full rotations within the original context.

        The result is an index, which may be fractional.
        """
        wavelength = original / (_positive(scaling, "beta", turns) * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = dimension(fast)
    high = dimension(slow)
    # An explicit null counts as false.
    if "truncate" not in scaling.values or scaling.bool("truncate", False):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)

    width = high - low or 0.001
    ramp = [min(1.0, max(0.0, (index - low) / width)) for index in range(head_dim // 2)]
    factors = [1.0 / (share / factor + 1.0 - share) for share in ramp]
    return Rope(theta, factors, _yarn_scale(scaling, factor))


def _yarn_scale(scaling: HFConfig, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling.float("attention_factor")
    mscale = scaling.float("mscale", 0.0)
    all_dim = scaling.float("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(
    config: HFConfig, scaling: HFConfig, theta: float, head_dim: int, original: int
) -> Rope:
    """Return LongRoPE's constants (Ding et al., 2024) for sequences up to the original context.

    Longer sequences are supported only if they use the same constants. Different constants would
    rotate all positions differently, so the KV of shorter sequences could not be reused.
    """
    short = _divisors(scaling, "short_factor", head_dim)
    long = _divisors(scaling, "long_factor", head_dim)
    longest = config.int("max_position_embeddings")
    factor = _factor(scaling, longest / original)
    scale = 1.0
    if factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    scale = scaling.float("attention_factor", scale)
    return Rope(theta, short, scale, None if short == long else min(longest, original))


def _divisors(scaling: HFConfig, key: str, head_dim: int) -> list[float]:
    values = scaling.list(key) or []
    numbers = [
        float(each)
        for each in values
        if isinstance(each, int | float) and not isinstance(each, bool) and each > 0
    ]
    if len(numbers) != len(values) or len(numbers) != head_dim // 2:
        raise WeightsError(
            f"{scaling.path}: {key} of the rope scaling is {values!r}, not {head_dim // 2} numbers "
            "above 0; download the model again"
        )
    return numbers
