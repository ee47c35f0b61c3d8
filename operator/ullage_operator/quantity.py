"""Kubernetes quantities and Go durations, as the CRD's patterns allow them."""

import math
import re
from decimal import Decimal

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[kMGTPE])?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|h|m|s)")
_SECONDS = {
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}


def parse_bytes(value: int | str) -> int:
    """Bytes of `2Gi`, `500M`, `1.5Gi` or 1024; a fraction of a byte is rounded up.

    Raises:
        ValueError: the text is not such a quantity.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity of bytes; write 512Mi, 2Gi or 1000000")
    number, suffix = match.groups()
    return math.ceil(Decimal(number) * scale(suffix or ""))


def scale(suffix: str) -> int:
    """Bytes of one unit: Ki is 1024, k is 1000, no suffix is 1."""
    if not suffix:
        return 1
    power = "kmgtpe".index(suffix[0].lower()) + 1
    return int((1024 if suffix.endswith("i") else 1000) ** power)


def parse_seconds(value: str) -> float:
    """Seconds of `10s`, `6ms` or `1m30s`.

    Raises:
        ValueError: the text is not such a duration.
    """
    if not value or _DURATION.sub("", value):
        raise ValueError(f"{value!r} is not a duration; write 10s, 6ms or 1m30s")
    parts = _DURATION.findall(value)
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))
