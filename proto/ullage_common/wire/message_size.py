"""Bounds the parts of a serialized message before anything is made of it.

Protobuf makes an object of every two bytes of empty messages, keeps the interpreter's lock until
the last one, and takes fifty times the bytes. The walk below makes nothing, and hands the lock on.
"""

from google.protobuf.descriptor import Descriptor

from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS

MAX_PARTS = 1 << 17
"""Fields and entries of all messages within one: 8192 turns with as many calls fit twice."""
LIGHT_PARTS = 1024
"""The same, of a message that is parsed at once."""
LIGHT_PACKED_BYTES = 1 << 20
"""Bytes of all its lists of numbers."""
MAX_DEPTH = 32
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_LAST_BYTES = bytes(range(128, 256))
"""All but those that end a number."""
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def check_message(data: bytes, descriptor: Descriptor) -> None:
    """Check a serialized message; the parser refuses one that cannot be read.

    Raises:
        ServiceError: INVALID_ARGUMENT, it has too many parts or a list of too many numbers.
    """
    if excess := _excess(data, descriptor, MAX_PARTS, len(data)):
        message = f"{descriptor.name} has more than {excess}; send fewer"
        raise invalid(descriptor.name, message, "BODY_TOO_LARGE")


def is_light(data: bytes, descriptor: Descriptor) -> bool:
    """Return whether a serialized message is parsed within a few milliseconds."""
    return not _excess(data, descriptor, LIGHT_PARTS, LIGHT_PACKED_BYTES)


def _excess(data: bytes, descriptor: Descriptor, max_parts: int, max_packed_bytes: int) -> str:
    """Return which bound a message exceeds; empty if it exceeds none."""
    num_parts = 0
    packed_bytes = 0
    waiting: list[tuple[int, int, Descriptor, int]] = [(0, len(data), descriptor, 0)]
    while waiting:
        at, end, kind, depth = waiting.pop()
        fields = kind.fields_by_number
        list_bytes: dict[int, int] = {}
        while at < end:
            num_parts += 1
            if num_parts > max_parts:
                return f"{max_parts} fields and entries"
            tag, at = _varint(data, at, end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _varint(data, at, end)
            elif wire_type in _SIZES:
                at += _SIZES[wire_type]
            elif wire_type == _BYTES:
                size, at = _varint(data, at, end)
                field = fields.get(tag >> 3)
                if at < 0 or at + size > end:
                    return ""
                inner = field.message_type if field is not None else None
                if inner is not None:
                    if depth == MAX_DEPTH:
                        return f"{MAX_DEPTH} levels"
                    waiting.append((at, at + size, inner, depth + 1))
                elif field is not None and field.is_packed:
                    packed_bytes += size
                    earlier = list_bytes.get(field.number, 0)
                    list_bytes[field.number] = earlier + size
                    if packed_bytes > max_packed_bytes:
                        return f"{max_packed_bytes} bytes of numbers"
                    # No serializer splits a list, so the bytes of its pieces count.
                    if earlier + size > MAX_PROMPT_TOKENS and (
                        earlier or _num_numbers(data[at : at + size]) > MAX_PROMPT_TOKENS
                    ):
                        return f"{MAX_PROMPT_TOKENS} numbers in {field.name}"
                at += size
            else:
                return ""  # groups, which no message here has
            if at < 0:
                return ""
    return ""


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and the place behind it; -1 if there is none."""
    value = 0
    shift = 0
    while 0 <= at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1


def _num_numbers(packed: bytes) -> int:
    """Count the numbers of a packed list; those of fixed size by an upper bound."""
    return len(packed.translate(None, _LAST_BYTES))
