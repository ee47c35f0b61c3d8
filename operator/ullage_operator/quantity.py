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


_POWERS = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", -3: "m"}


def amount(value: int | str) -> Decimal:
    """What a quantity of anything says, such as 0.5 of `500m`.

    Raises:
        ValueError: the text is not a quantity, `m` for thousandths included.
    """
    text = str(value)
    match = _QUANTITY.fullmatch(text.removesuffix("m"))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write 500m, 2, 512Mi or 2Gi")
    number, suffix = match.groups()
    return Decimal(number) * (Decimal("0.001") if text.endswith("m") else scale(suffix or ""))


def canonical(value: int | str) -> str:
    """A quantity as the API server stores it, so that what is applied equals what is read.

    Raises:
        ValueError: the text is not a quantity.
    """
    number = amount(value)
    if str(value).endswith("i") and number >= 1024 and number == int(number):
        return _in_powers_of_1024(int(number))
    return _in_powers_of_1000(number)


def _in_powers_of_1024(number: int) -> str:
    power = 0
    while number % 1024 == 0 and power < len("KMGTPE"):
        number, power = number // 1024, power + 1
    return f"{number}{'KMGTPE'[power - 1]}i" if power else str(number)


def _in_powers_of_1000(number: Decimal) -> str:
    if number == 0:
        return "0"
    milli, power = math.ceil(number.scaleb(3)), -3
    while milli % 1000 == 0 and power < max(_POWERS):
        milli, power = milli // 1000, power + 3
    return f"{milli}{_POWERS[power]}"
