"""Reads a GGUF file's metadata without using numpy or reading any tensors.

A file begins with its metadata: magic `GGUF`, version (uint32), tensor count and pair count
(uint64), then pairs of (string key, uint32 type, value). A string is a uint64 length and UTF-8
bytes. An array is a uint32 element type, a uint64 count and its elements. All values are
little-endian.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_STRING = 8
_ARRAY = 9
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
"""`struct` formats of scalar values, by GGUF value type. Strings and arrays are read separately."""

_SIZE = struct.Struct("<Q")
"""`struct` format of a string's length."""

Value = int | float | bool | str | list["Value"]


class GgufError(Exception):
    """The file is not a readable GGUF file. The message is a single line that names the file."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Read all key-value pairs of a GGUF file.

    Raises:
        GgufError: if the file is missing, is not a GGUF file, or ends inside its header.
    """
    with _opened(path) as reader:
        return dict(reader.pairs())


def read_architecture(path: Path) -> Value | None:
    """Read a GGUF file's architecture, and stop before the metadata that follows it.

    Raises:
        GgufError: if the file is missing, is not a GGUF file, or ends before the architecture.
    """
    with _opened(path) as reader:
        pairs = reader.pairs()
        return next((value for key, value in pairs if key == "general.architecture"), None)


@contextmanager
def _opened(path: Path) -> Iterator["_Reader"]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(data)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}; name an existing GGUF file") from error
    except (struct.error, IndexError, ValueError) as error:
        # Mapping an empty file raises ValueError, too.
        raise GgufError(f"{path}: not a whole GGUF file ({error}); fetch it again") from error


class _Reader:
    """A cursor over the mapped file. Reading past the end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self) -> Iterator[tuple[str, Value]]:
        """Yield the key-value pairs in the order in which the file stores them."""
        if self._take(4) != MAGIC:
            raise ValueError("the file does not begin with GGUF")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version}; versions {SUPPORTED_VERSIONS} are supported")

        # The number of tensors, which are described after the pairs.
        self._scalar("Q")
        for _ in range(int(self._scalar("Q"))):
            yield self._pair()

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
        kind = int(self._scalar("I"))
        count = int(self._scalar("Q"))
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(kind) for _ in range(count)]
        layout = f"<{count}{_format_of(kind)}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[Value]:
        """Read an array of strings.

        A vocabulary has about 100,000 strings, so the loop makes few Python calls.
        """
        data = self._data
        at = self._at
        texts = list[Value]()

        for _ in range(count):
            [size] = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            text = data[at : at + size]
            if len(text) < size:
                raise IndexError(f"the header needs {at + size} bytes, the file has {len(data)}")
            texts.append(text.decode("utf-8", "replace"))
            at += size

        self._at = at
        return texts

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
