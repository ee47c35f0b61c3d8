"""Limits the number of fields in a serialized protobuf message before the message is parsed.

For a list of empty messages, protobuf creates one object for every two bytes. It holds the GIL
throughout, and needs fifty times the message's memory. The scan in this module creates no objects,
and lets other threads take the GIL in between.
"""

from google.protobuf.descriptor import Descriptor

from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS

MAX_PARTS = 1 << 17
"""Maximum number of fields and list entries in a message, including nested messages.

This is twice the number in a conversation of 8192 turns with as many tool calls.
"""
LIGHT_PARTS = 1024
"""Maximum number of fields and list entries in a message that the event loop may parse."""
LIGHT_PACKED_BYTES = 1 << 20
"""Maximum total bytes of packed number lists in a message that the event loop may parse."""
MAX_DEPTH = 32
"""Maximum nesting depth of messages."""
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_LAST_BYTES = bytes(range(128, 256))
"""Values of those bytes of a varint that are not its last. The last byte is below 128."""
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def check_message(data: bytes, descriptor: Descriptor) -> None:
    """Check the number of fields and list entries in a serialized message before it is parsed.

    Malformed messages are left to the parser.

    Raises:
        ServiceError: INVALID_ARGUMENT, the message has too many fields and entries, or a list with
            too many numbers.
    """
    if excess := _excess(data, descriptor, MAX_PARTS, len(data)):
        message = f"{descriptor.name} has more than {excess}; send fewer"
        raise invalid(descriptor.name, message, "BODY_TOO_LARGE")


def is_light(data: bytes, descriptor: Descriptor) -> bool:
    """Return whether parsing a serialized message takes at most a few milliseconds."""
    return not _excess(data, descriptor, LIGHT_PARTS, LIGHT_PACKED_BYTES)


def _excess(data: bytes, descriptor: Descriptor, max_parts: int, max_packed_bytes: int) -> str:
    """Describe the limit that a message exceeds (empty if the message is within all limits)."""
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
                    # No serializer splits a list. For a split one, bytes count instead of numbers.
                    if earlier + size > MAX_PROMPT_TOKENS and (
                        earlier or _num_numbers(data[at : at + size]) > MAX_PROMPT_TOKENS
                    ):
                        return f"{MAX_PROMPT_TOKENS} numbers in {field.name}"
                at += size
            else:
                return ""  # a group, which no message here has

            if at < 0:
                return ""
    return ""


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a varint, and return its value and the index after it (-1 if there is no varint)."""
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
    """Count the numbers in a packed list. For fixed-size numbers, this is only an upper bound."""
    return len(packed.translate(None, _LAST_BYTES))
