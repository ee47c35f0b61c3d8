"""Sampling noise as a pure function, so that a resumed request draws what it would have drawn."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) for the token at `position` of a request with this seed.

    Two rounds of SplitMix64 (Steele, Lea and Flood, 2014) over the pair; 23 bits, so that it and
    its distance from 1 are exact in float32.
    """
    mixed = _mix((_mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (position + 1)) & _MASK)
    return ((mixed >> 41) + 0.5) / (1 << 23)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
