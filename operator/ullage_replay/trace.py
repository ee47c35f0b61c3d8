"""Reads a trace of requests: this project's JSONL, Mooncake's JSONL or Azure's CSV.

Every format states when a request arrives and how many tokens its prompt and answer have. None has
text. Requests share prompt prefixes by name: by `prefix` or `session` in this project's format, and
by the ids of 512-token blocks in Mooncake's.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ullage_common.wire.limits import MAX_PRIORITY

MOONCAKE_BLOCK = 512
"""Tokens for which one of Mooncake's `hash_ids` stands."""
MAX_TOKENS = 1 << 24
"""Largest number of tokens in a field. A larger one is a mistake, such as a number of bytes."""
MAX_FIRST_S = 7 * 86400.0
"""Latest arrival of the first row in seconds. A later one is a mistake, such as a Unix time."""

AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIELDS = (*("at", "prompt_tokens", "output_tokens", "max_tokens", "session", "prefix", "priority"),)
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

Row = Mapping[str, Any]


class TraceError(Exception):
    """A row cannot be replayed. The message names the file, line, field, value and remedy."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    at: float
    """Seconds from the beginning of the trace to the request's arrival."""
    prompt_tokens: int
    output_tokens: int
    """Tokens after which the model ends its answer, unless `max_tokens` ends it before."""
    max_tokens: int | None = None
    """The client's output limit, or None if it sets none."""
    session: str = ""
    """Name of the conversation. Each turn's prompt continues the turn before and its answer."""
    prefix: str = ""
    """Name of a prefix that all prompts with the same name share."""
    prefix_tokens: int = 0
    """Length of that prefix in tokens."""
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's 512-token blocks, of which equal prefixes are shared."""
    priority: int = 0


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace, in order of arrival. The first request of CSV and Mooncake arrives at 0 s.

    Raises:
        TraceError: the file cannot be read, is empty, or has a wrong row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise TraceError(f"{path}: {reason}; give a trace in JSONL or CSV") from None

    lines = text.splitlines()
    is_csv = bool(lines) and lines[0].split(",")[0].strip() == AZURE_FIELDS[0]
    rows = _azure_rows(path, lines) if is_csv else _json_rows(path, lines)
    requests = sorted(rows, key=lambda each: each.at)
    if not requests:
        raise TraceError(f"{path}: no requests; give at least one row, such as {EXAMPLE}")
    return requests


EXAMPLE = '{"at": 0.5, "prompt_tokens": 200, "output_tokens": 64}'


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    first_ms: float | None = None
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise TraceError(f"{place}: {line[:60]!r} is not JSON; write {EXAMPLE}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{place}: {line[:60]!r} is no object; write {EXAMPLE}")

        if "timestamp" in row:
            _check_fields(place, row, MOONCAKE_FIELDS)
            at_ms = _number(place, row, "timestamp")
            first_ms = at_ms if first_ms is None else first_ms
            yield _mooncake_request(place, row, at_ms - first_ms)
        else:
            _check_fields(place, row, FIELDS)
            request = _own_request(place, row)
            if is_first and request.at > MAX_FIRST_S:
                raise TraceError(
                    f"{place}: at: {row['at']!r} is more than a week; "
                    "write seconds from the beginning of the trace"
                )
            is_first = False
            yield request


def _own_request(place: str, row: Row) -> TraceRequest:
    prompt_tokens = _tokens(place, row, "prompt_tokens")
    prefix = row.get("prefix") or {}
    if not (isinstance(prefix, dict) and set(prefix) <= {"id", "tokens"}):
        raise TraceError(
            f"{place}: prefix: {prefix!r} is not understood; "
            'write {"id": "system", "tokens": 120} or leave it out'
        )
    session = _text(place, row, "session")
    if prefix and session:
        raise TraceError(
            f"{place}: prefix: {prefix!r} beside session {session!r}; leave one of them out, since "
            "a session's prompts already share their beginnings"
        )
    prefix_tokens = _tokens(f"{place}: prefix", prefix, "tokens") if prefix else 0
    if prefix_tokens > prompt_tokens:
        raise TraceError(
            f"{place}: prefix.tokens: {prefix_tokens} exceeds prompt_tokens {prompt_tokens}; "
            "prompt_tokens counts the whole prompt, so raise it or lower prefix.tokens"
        )
    max_tokens = None if row.get("max_tokens") is None else _tokens(place, row, "max_tokens")
    return TraceRequest(
        at=_number(place, row, "at"),
        prompt_tokens=prompt_tokens,
        output_tokens=_tokens(place, row, "output_tokens"),
        max_tokens=max_tokens,
        session=session,
        prefix=_text(place, prefix, "id"),
        prefix_tokens=prefix_tokens,
        priority=_priority(place, row),
    )


def _mooncake_request(place: str, row: Row, after_ms: float) -> TraceRequest:
    blocks = row.get("hash_ids", [])
    is_list = isinstance(blocks, list) and all(type(each) is int for each in blocks)
    if not is_list:
        raise TraceError(
            f"{place}: hash_ids: {blocks!r} is no list of integers; give one id a block"
        )
    prompt_tokens = _tokens(place, row, "input_length")
    if len(blocks) > -(-prompt_tokens // MOONCAKE_BLOCK):
        raise TraceError(
            f"{place}: hash_ids: {len(blocks)} blocks of {MOONCAKE_BLOCK} tokens exceed "
            f"input_length {prompt_tokens}; leave out the last ones"
        )
    if after_ms < 0:
        raise TraceError(
            f"{place}: timestamp: {row['timestamp']!r} is before the first row's; sort the rows"
        )
    return TraceRequest(
        at=after_ms / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=_tokens(place, row, "output_length"),
        blocks=tuple(blocks),
    )


def _azure_rows(path: Path, lines: list[str]) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        place = f"{path}:{number}"
        missing = [name for name in AZURE_FIELDS if not row.get(name)]
        if missing:
            raise TraceError(
                f"{place}: {missing[0]}: nothing; give the columns {', '.join(AZURE_FIELDS)}"
            )
        text = row[AZURE_FIELDS[0]].strip()
        try:
            # Azure writes seven digits behind the second, and Python reads six.
            when = datetime.fromisoformat(_six_digits(text)).replace(tzinfo=None)
        except ValueError:
            raise TraceError(
                f"{place}: {AZURE_FIELDS[0]}: {text!r} is no time; write 2023-11-16 18:15:46.680590"
            ) from None
        first = first or when
        if when < first:
            raise TraceError(
                f"{place}: {AZURE_FIELDS[0]}: {text!r} is before the first row's; sort the rows"
            )
        counts = {name: _count(place, name, row[name]) for name in AZURE_FIELDS[1:]}
        yield TraceRequest(
            at=(when - first).total_seconds(),
            prompt_tokens=_tokens(place, counts, AZURE_FIELDS[1]),
            output_tokens=_tokens(place, counts, AZURE_FIELDS[2]),
        )


def _six_digits(text: str) -> str:
    whole, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{whole}{dot}{digits[:6]}{rest[len(digits) :]}" if dot else text


def _count(place: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TraceError(f"{place}: {name}: {text!r} is no whole number; write one") from None


def _check_fields(place: str, row: Row, known: tuple[str, ...]) -> None:
    unknown = [name for name in row if name not in known]
    if unknown:
        raise TraceError(
            f"{place}: {unknown[0]}: {row[unknown[0]]!r} is not a field of a trace; "
            f"leave it out, or use one of {', '.join(known)}"
        )


def _number(place: str, row: Row, name: str) -> float:
    value = row.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number and value is not None else -1.0
    if not (math.isfinite(number) and number >= 0):
        raise TraceError(f"{place}: {name}: {value!r} is no number from 0; write one, such as 1.5")
    return number


def _tokens(place: str, row: Row, name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise TraceError(
            f"{place}: {name}: {value!r} is no number of tokens; write 1 to {MAX_TOKENS}"
        )
    return value


def _text(place: str, row: Row, name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise TraceError(f'{place}: {name}: {value!r} is no text; put it in quotes, as "{value}"')
    return value


def _priority(place: str, row: Row) -> int:
    value = row.get("priority", 0)
    if type(value) is not int or abs(value) > MAX_PRIORITY:
        raise TraceError(
            f"{place}: priority: {value!r} is no priority; write -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return value
