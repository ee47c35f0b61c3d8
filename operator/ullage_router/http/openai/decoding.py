"""Decodes JSON bodies into structures, with errors that name the field.

Long bodies are decoded field by field, and long lists of token ids in chunks, since a parser holds
the GIL until it returns.
"""

import functools
import re
from array import array
from collections.abc import Mapping
from typing import Protocol, TypeVar, cast

import msgspec

from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.json_size import BODY_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_PROMPT_TOKENS
from ullage_router.http.openai.schemas import (
    NULL,
    Token,
    max_field_bytes,
)
from ullage_router.intake import INLINE_BYTES

SUCCESSORS = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""Deprecated fields of OpenAI or vLLM, with the fields that replace them."""
PIECE_BYTES = 64 << 10
"""Maximum bytes of JSON decoded at a time, and maximum number of token ids copied at a time."""

_AT = re.compile(r"^(?P<what>.*) - at `(?P<key>key in )?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF_PAIR_BYTES = 11
"""Number of bytes at the end of a body in which to look for half an escaped surrogate pair.

If a body ends too soon after such a half, msgspec reports truncated JSON. The escaped half takes
six bytes, and the rest of the pair at most five.
"""
_HALF_PAIR_ERRORS = ("surrogate pair", "unexpected end of hex escape")
"""Substrings of msgspec's error messages about half a surrogate pair.

msgspec uses the second message for fields that it skips.
"""
_TOKENS = msgspec.json.Decoder(list[Token])


class _Body(Protocol):
    def refused(self) -> tuple[str, object] | None: ...


T = TypeVar("T", bound=_Body)
V = TypeVar("V")
_Decoders = Mapping[str, msgspec.json.Decoder[object] | None]
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def body_decoder(kind: type[V]) -> msgspec.json.Decoder[V]:
    """Return a decoder of bodies that reads numbers as leniently as vLLM.

    Where a number is meant, `100.0` and `"100"` are 100. Text stays text.
    """
    return msgspec.json.Decoder(kind, strict=False)


def parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body as `parse_fields` does, and return its structure only."""
    return parse_fields(decoder, body)[0]


def parse_fields(decoder: msgspec.json.Decoder[T], body: bytes) -> tuple[T, tuple[str, ...]]:
    """Decode a body, and refuse fields that the service cannot honour.

    Args:
        decoder: The decoder of the body's type.
        body: The JSON.

    Returns:
        The body's structure, and the names of its unknown fields, which have no effect.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    try:
        if len(body) <= INLINE_BYTES:
            parsed = decoder.decode(body)
            unknown = _unknown(decoder.type, _RAW_FIELDS.decode(body))
        else:
            parsed, unknown = _decode_long(decoder, body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except UnicodeDecodeError as error:
        raise invalid("body", "body: the JSON is not valid UTF-8; encode it as UTF-8") from error
    except msgspec.DecodeError as error:
        if _is_half_pair(str(error), body):
            message = "body: a string has half a surrogate pair; escape both halves, or send UTF-8"
            raise invalid("body", message) from error
        raise invalid("body", f"body: {error}; send one JSON object") from error
    except RecursionError as error:
        raise invalid("body", "body: the JSON is nested too deeply; flatten it") from error

    if refused := parsed.refused():
        name, value = refused
        remedy = f"send {SUCCESSORS[name]}" if name in SUCCESSORS else "leave it out"
        raise invalid(name, f"{name} is {_short(value)}, which is not supported; {remedy}")
    return parsed, unknown


def decode_field(decoder: msgspec.json.Decoder[V], raw: msgspec.Raw, name: str) -> V:
    """Decode one field of a body.

    Raises:
        ServiceError: The field is invalid. The error names the location within the field.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), name) from error


def utf8(field: str, text: str) -> str:
    """Check that the text can be encoded in UTF-8, and return the text.

    Raises:
        ServiceError: The text has an unpaired surrogate, which UTF-8 cannot encode.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{field} has an unpaired surrogate; send valid Unicode"
        raise invalid(field, message) from error
    return text


def _unknown(kind: type, given: Mapping[str, msgspec.Raw]) -> tuple[str, ...]:
    """Return the names of given fields that the type does not have and that are not null."""
    return tuple(sorted(n for n in given.keys() - _names(kind) if given[n] != NULL))


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _decode_long(decoder: msgspec.json.Decoder[T], body: bytes) -> tuple[T, tuple[str, ...]]:
    """Decode a body field by field, with a bound on the size of each field.

    A parser holds the GIL until it returns, and checks the length of a list only after it has built
    the whole list.

    Raises:
        ServiceError: A field is invalid or too long, or the body has too many parts.
        msgspec.DecodeError: The body is not a JSON object.
    """
    JsonCounter("body", BODY_LIMITS).add(body)

    kind = decoder.type
    given = _RAW_FIELDS.decode(body)
    values = {}
    for name, field_decoder in _field_decoders(kind, decoder.strict).items():
        raw = given.get(name)
        if raw is None:  # the field is absent
            continue
        limit = max_field_bytes(name)
        if limit is not None and len(raw) > limit:
            raise invalid(name, f"{name} has {len(raw)} bytes of JSON; send at most {limit}")
        if len(raw) < len(body) // 2:
            raw = raw.copy()  # a view would keep the whole body alive
        values[name] = raw if field_decoder is None else decode_field(field_decoder, raw, name)

    for field in msgspec.structs.fields(cast(type[msgspec.Struct], kind)):
        if field.required and field.name not in values:
            raise invalid(field.name, f"{field.name} is missing; it is required")
    return kind(**values), _unknown(kind, given)


@functools.cache
def _field_decoders(kind: type, strict: bool) -> _Decoders:
    """Return a decoder for each field, or None for a field whose JSON is decoded later."""
    return {
        field.name: None
        if field.type is msgspec.Raw
        else msgspec.json.Decoder(field.type, strict=strict)
        for field in msgspec.structs.fields(kind)
    }


def _is_half_pair(text: str, body: bytes) -> bool:
    """Return whether a msgspec error was caused by half of an escaped surrogate pair.

    If this half is at the end of the body, msgspec reports truncated JSON.

    Args:
        text: The message of msgspec's error.
        body: The JSON.
    """
    if "truncated" not in text:
        return any(words in text for words in _HALF_PAIR_ERRORS)
    half = _HALF_PAIR.search(body, max(0, len(body) - _HALF_PAIR_BYTES))
    if half is None:
        return False

    # An odd number of backslashes, the escape's own included, makes it an escape, not text.
    before = body[: half.start() + 1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _validation_error(text: str, name: str = "") -> ServiceError:
    """Return the ServiceError for a msgspec error.

    Args:
        text: The message of msgspec's error.
        name: The field that was decoded (empty for the whole body).
    """
    if match := _AT.match(text):
        path = match["path"]
        dot = "." if name and path and not path.startswith("[") else ""
        field = f"{name}{dot}{path}" or "body"
        return invalid(field, f"{field}: {_lower(match['what'])}")
    if not name and (match := _MISSING.search(text)):
        return invalid(match["name"], f"{match['name']} is missing; it is required")
    return invalid(name or "body", f"{name or 'body'}: {_lower(text)}")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _short(value: object) -> str:
    """Return the JSON of a value, shortened if it is long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def long_token_lists(raw: msgspec.Raw, field: str) -> "list[array[int]] | None":
    """Decode a long JSON list of token ids, or a list of such lists, using four bytes per id.

    Returns:
        One array for a list of token ids, or several arrays for a list of lists. None if the JSON
        is short, is neither kind of list, or has an error that the full decoder will report.

    Raises:
        ServiceError: There are more token ids than a prompt may have.
    """
    text = bytes(raw) if len(raw) > INLINE_BYTES else b""
    if not text.startswith(b"[") or b'"' in text:
        return None

    text = text[1:-1].strip()
    if text.count(b",") >= MAX_PROMPT_TOKENS:
        message = f"{field}: expected `array` of length <= {MAX_PROMPT_TOKENS}"
        raise invalid(field, message)

    if not text.startswith(b"["):
        ids = _token_ids(text)
        return None if ids is None else [ids]

    lists = []
    for before in text.removesuffix(b"]").split(b"]"):
        gap, bracket, inner = before.partition(b"[")
        ids = _token_ids(inner)
        if gap.strip() not in (b"", b",") or not bracket or ids is None:
            return None
        lists.append(ids)
    return lists


def _token_ids(text: bytes) -> "array[int] | None":
    """Return the token ids of a list without its brackets, or None if an item is not a token id."""
    ids = array("I")
    start = 0
    while start < len(text):
        comma = text.find(b",", start + PIECE_BYTES)
        end = len(text) if comma < 0 else comma
        try:
            ids.extend(_TOKENS.decode(b"[%b]" % text[start:end]))
        except msgspec.DecodeError:
            return None
        start = end + 1
    return ids
