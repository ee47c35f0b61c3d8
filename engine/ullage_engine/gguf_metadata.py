"""The key-value header of a GGUF file, read without numpy and without touching a tensor.

The format: magic `GGUF`, version (uint32), tensor count and pair count (uint64), then pairs of
(string key, uint32 type, value); a string is a uint64 length and UTF-8 bytes; an array is a
uint32 element type, a uint64 count and its elements; everything little-endian.
"""

import mmap
import struct
from pathlib import Path

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

Value = int | float | bool | str | list["Value"]


class GgufError(Exception):
    """The file is not a GGUF file that can be read; one line that names it."""


def read_metadata(path: Path) -> dict[str, Value]:
    """All key-value pairs of a GGUF file.

    Raises:
        GgufError: the file is missing, is no GGUF file, or ends inside its header.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).pairs()
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}; name an existing GGUF file") from error
    except (struct.error, IndexError, ValueError) as error:
        # ValueError is also what mapping an empty file raises.
        raise GgufError(f"{path}: not a whole GGUF file ({error}); fetch it again") from error


class _Reader:
    """A cursor over the mapped file; running off its end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self) -> dict[str, Value]:
        if self._take(4) != MAGIC:
            raise ValueError("the file does not begin with GGUF")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version}; versions {SUPPORTED_VERSIONS} are supported")
        self._scalar("Q")  # tensors, described after the pairs
        return dict(self._pair() for _ in range(int(self._scalar("Q"))))

    def _pair(self) -> tuple[str, Value]:
        key = self._string()
        return key, self._value(int(self._scalar("I")))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_format_of(kind))

    def _array(self) -> list[Value]:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        layout = f"<{count}{_format_of(kind)}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8", "replace")

    def _scalar(self, layout: str) -> int | float | bool:
        size = struct.calcsize("<" + layout)
        value: int | float | bool = struct.unpack("<" + layout, self._take(size))[0]
        return value

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise IndexError(f"the header needs {end} bytes, the file has {len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken


def _format_of(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]
