"""Bounds the parts of a serialized message before anything is made of it.

Protobuf makes an object of every two bytes of empty messages, keeps the interpreter's lock until
the last one, and takes fifty times the bytes. The walk below makes nothing, and hands the lock on.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS

MAX_PARTS = 1 << 17
"""Fields and entries of all messages within one: 8192 turns with as many calls fit twice."""
MAX_DEPTH = 32
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LAST_BYTES = bytes(range(128, 256))
"""All but those that end a number."""
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def check_message(data: bytes, descriptor: Descriptor) -> None:
    """Check a serialized message; the parser refuses one that cannot be read.

    Raises:
        ServiceError: INVALID_ARGUMENT, it has too many parts or a list of too many numbers.
    """
    num_parts = 0
    waiting: list[tuple[int, int, Descriptor, int]] = [(0, len(data), descriptor, 0)]
    while waiting:
        at, end, kind, depth = waiting.pop()
        fields = kind.fields_by_number
        while at < end:
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise _too_many(descriptor, f"{MAX_PARTS} fields and entries")
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
                    return
                inner = field.message_type if field is not None else None
                if inner is not None:
                    if depth == MAX_DEPTH:
                        raise _too_many(descriptor, f"{MAX_DEPTH} levels")
                    waiting.append((at, at + size, inner, depth + 1))
                elif field is not None and field.is_packed and size > MAX_PROMPT_TOKENS:
                    _check_numbers(descriptor, field, data[at : at + size])
                at += size
            else:
                return  # groups, which no message here has
            if at < 0:
                return


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


def _check_numbers(descriptor: Descriptor, field: FieldDescriptor, packed: bytes) -> None:
    """Count the numbers of a packed list; those of fixed size by an upper bound."""
    if len(packed.translate(None, _LAST_BYTES)) > MAX_PROMPT_TOKENS:
        raise _too_many(descriptor, f"{MAX_PROMPT_TOKENS} numbers in {field.name}")


def _too_many(descriptor: Descriptor, what: str) -> ServiceError:
    message = f"{descriptor.name} has more than {what}; send fewer"
    return invalid(descriptor.name, message, "BODY_TOO_LARGE")
