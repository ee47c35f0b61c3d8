"""Converts Kubernetes quantities and Go durations to bytes, numbers and seconds."""

import math
import re
from decimal import Decimal

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[kMGTPE])?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|h|m|s)")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_SECONDS = {
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}
_MAX_SECONDS = 100 * 365 * 86400
"""Longest duration, in seconds. The CRD accepts longer ones, which are capped at this value."""
_POWERS = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", -3: "m"}


def parse_bytes(value: int | str) -> int:
    """Parse a quantity such as `2Gi`, `500M`, `1.5Gi` or 1024, and round it up to whole bytes.

    Raises:
        ValueError: the text is not a valid quantity.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity of bytes; write 512Mi, 2Gi or 1000000")
    number, suffix = match.groups()
    return math.ceil(Decimal(number) * scale(suffix or ""))


def scale(suffix: str) -> int:
    """Return the factor of a unit suffix: 1024 for Ki, 1000 for k, and 1 without a suffix."""
    if not suffix:
        return 1
    power = "kmgtpe".index(suffix[0].lower()) + 1
    return int((1024 if suffix.endswith("i") else 1000) ** power)


def parse_decimal(value: int | str) -> float:
    """Parse a number that the API writes as an integer or as text, such as 2 or `0.5`.

    Raises:
        ValueError: the text is not a valid number.
    """
    if not _DECIMAL.fullmatch(str(value)):
        raise ValueError(f'{value!r} is not a number; write 2 or, in quotes, "0.5"')
    return float(value)


def parse_seconds(value: int | str) -> float:
    """Convert a Go duration such as `10s`, `6ms` or `1m30s` to seconds.

    Raises:
        ValueError: the text is not a valid duration.
    """
    text = str(value)
    if not text or _DURATION.sub("", text):
        raise ValueError(f"{value!r} is not a duration; write 10s, 6ms or 1m30s")
    parts = _DURATION.findall(text)
    total = sum(Decimal(number) * _SECONDS[unit] for number, unit in parts)
    return float(min(total, _MAX_SECONDS))


def amount(value: int | str) -> Decimal:
    """Return the value of a quantity, such as 0.5 for `500m`.

    Raises:
        ValueError: the text is not a quantity. The suffix `m` for thousandths is allowed.
    """
    text = str(value)
    match = _QUANTITY.fullmatch(text.removesuffix("m"))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write 500m, 2, 512Mi or 2Gi")
    number, suffix = match.groups()
    return Decimal(number) * (Decimal("0.001") if text.endswith("m") else scale(suffix or ""))


def canonical(value: int | str) -> str:
    """Return a quantity as the API server stores it, so that applied and stored objects are equal.

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
        number = number // 1024
        power = power + 1
    return f"{number}{'KMGTPE'[power - 1]}i" if power else str(number)


def _in_powers_of_1000(number: Decimal) -> str:
    if number == 0:
        return "0"
    milli = math.ceil(number.scaleb(3))
    power = -3
    while milli % 1000 == 0 and power < max(_POWERS):
        milli = milli // 1000
        power = power + 3
    return f"{milli}{_POWERS[power]}"
