"""Reads headers of GGUF files, and handles models that are split into several files.

This module imports neither torch nor numpy, and does not read tensor data. A header consists of the
magic `GGUF`, the version (uint32), the number of tensors and the number of metadata pairs (both
uint64), the metadata as key-value pairs, and the name, shape, type and offset of each tensor. The
data section follows at a multiple of the alignment. llama.cpp splits a model into files named
`NAME-00001-of-0000N.gguf`. Only the first part contains all metadata pairs, while every part
contains `split.no`, `split.count` and `split.tensors.count`.
"""

import errno
import math
import mmap
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ullage_engine.model_loader.file_check import check_file
from ullage_engine.protocol.errors import WeightsError

VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of the data section in bytes, unless `general.alignment` has another value."""

SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Formats of scalar metadata values for the `struct` module, by type."""

STRING = 8
ARRAY = 9

BLOCKS = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # BF16
    39: (32, 17),  # MXFP4
}
"""Elements and bytes per block, by tensor type. Readers refuse types that are not listed here."""

_MAX_DIMENSIONS = 4
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_NAMED = 5
_COPY_BYTES = 8 << 20

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The position of a tensor in the data section of its file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    """Byte offset from the start of the data section."""
    nbytes: int | None
    """Size of the tensor in bytes, or None if its type is unknown."""


@dataclass(slots=True)
class GgufHeader:
    """The header of one GGUF file, without the values of its arrays."""

    path: Path
    version: int = 0
    num_pairs: int = 0
    pairs: tuple[int, int] = (0, 0)
    """Byte offsets of the beginning and the end of the metadata pairs."""
    values: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Scalar and string values of the metadata pairs, by key."""
    tensors: list[GgufTensor] = field(default_factory=list)
    data_start: int = 0
    """Offset of the data section in bytes."""

    @property
    def alignment(self) -> int:
        return int(self.values.get("general.alignment", ALIGNMENT))

    @property
    def num_parts(self) -> int:
        """Number of files into which the model was split, or 1 if it was not split."""
        return max(1, self._number("split.count", 1))

    @property
    def part(self) -> int:
        """Zero-based index of this file among the parts of the split model."""
        return self._number("split.no", 0)

    @property
    def num_tensors_of_all(self) -> int:
        """Total number of tensors in all parts, or -1 if the metadata does not specify it."""
        return self._number("split.tensors.count", -1)

    def _number(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        return value if isinstance(value, int) else default


def gguf_parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, or only `path` if the file is not split."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return [path]
    count = int(match["count"])
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def check_gguf(path: Path) -> list[GgufHeader]:
    """Check the header of a model file, or of every part if `path` is the first of several.

    Raises:
        WeightsError: a file is missing, truncated, damaged, or belongs to another model.
    """
    first = read_gguf_header(path)
    count = first.num_parts
    if count == 1:
        return [first]
    parts = gguf_parts(path)
    if len(parts) != count or parts[first.part : first.part + 1] != [path]:
        raise WeightsError(
            f"{path}: part {first.part + 1} of {count} by its metadata, and not by its name; name "
            f"the parts NAME-00001-of-{count:05}.gguf and so on, and give the first as the source"
        )
    check_parts(path)
    headers = [first] + [read_gguf_header(each) for each in parts[1:]]
    _check_agreement(headers)
    return headers


def check_parts(path: Path) -> None:
    """Check that all parts of a split file are in its folder.

    Raises:
        WeightsError: a part is missing.
    """
    parts = gguf_parts(path)
    missing = [each.name for each in parts if not os.path.lexists(each)]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise WeightsError(
            f"{path}: one of {len(parts)} parts of a model; missing beside it are "
            f"{', '.join(missing[:_MAX_NAMED])}{more}; download all parts into one folder"
        )


def _check_agreement(headers: Sequence[GgufHeader]) -> None:
    first = headers[0]
    file_of: dict[str, Path] = {}
    for number, header in enumerate(headers):
        if (header.part, header.num_parts) != (number, len(headers)):
            raise WeightsError(
                f"{header.path}: part {header.part + 1} of {header.num_parts} by its metadata, not "
                f"{number + 1} of {len(headers)} as its name says; download all parts again"
            )
        for tensor in header.tensors:
            other = file_of.setdefault(tensor.name, header.path)
            if other != header.path:
                raise WeightsError(
                    f"{header.path}: tensor {tensor.name!r} is in {other.name}, too; download all "
                    "parts again"
                )
    expected = first.num_tensors_of_all
    if expected not in (-1, len(file_of)):
        raise WeightsError(
            f"{first.path}: its parts have {len(file_of)} tensors, and the model {expected}; "
            "download all parts again"
        )


def join_parts(headers: Sequence[GgufHeader], target: Path) -> None:
    """Merge the parts of a split model into one file, with the first part's metadata pairs.

    Raises:
        OSError: the file cannot be written.
    """
    first = headers[0]
    alignment = first.alignment
    infos = bytearray()
    places = []
    offset = 0
    for header in headers:
        # A tensor ends where the next one begins, so its type need not be known.
        data_bytes = header.path.stat().st_size - header.data_start
        ends = [tensor.offset for tensor in header.tensors[1:]] + [data_bytes]
        for tensor, end in zip(header.tensors, ends, strict=True):
            infos += _encode(tensor, offset)
            size = end - tensor.offset
            places.append((header, tensor.offset, size))
            offset += -(-size // alignment) * alignment

    with first.path.open("rb") as file:
        file.seek(first.pairs[0])
        pairs = file.read(first.pairs[1] - first.pairs[0])
    with target.open("wb") as joined:
        joined.write(b"GGUF" + _UINT32.pack(first.version))
        joined.write(_UINT64.pack(len(places)) + _UINT64.pack(first.num_pairs))
        joined.write(pairs)
        joined.write(infos)
        for header, begin, size in places:
            joined.write(bytes(-joined.tell() % alignment))
            with header.path.open("rb") as file:
                file.seek(header.data_start + begin)
                _copy(file, joined, size)


def _encode(tensor: GgufTensor, offset: int) -> bytes:
    name = tensor.name.encode()
    shape = b"".join(map(_UINT64.pack, tensor.shape))
    place = _UINT32.pack(tensor.kind) + _UINT64.pack(offset)
    return _UINT64.pack(len(name)) + name + _UINT32.pack(len(tensor.shape)) + shape + place


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size > 0:
        chunk = source.read(min(size, _COPY_BYTES))
        if not chunk:
            raise OSError(errno.EIO, "the file became shorter", source.name)
        target.write(chunk)
        size -= len(chunk)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one file, and check that its tensors are complete and in order.

    Raises:
        WeightsError: the file cannot be read, or is not a complete GGUF file.
    """
    check_file(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(path)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; check the file") from error
    except ValueError as error:
        # Mapping an empty file raises ValueError, too.
        raise WeightsError(f"{path}: not a whole GGUF file ({error}); download it again") from error


class _Cursor:
    """A read position in a memory-mapped file. Reading past the end raises ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self, path: Path) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        header = GgufHeader(path, version=self._uint32())
        if header.version not in VERSIONS:
            raise ValueError(f"version {header.version}; versions {VERSIONS} are supported")
        num_tensors = self._count(_UINT64.size + 2 * _UINT32.size + _UINT64.size)
        header.num_pairs = self._count(_UINT64.size + _UINT32.size + 1)
        begin = self._at
        seen = set()
        for _ in range(header.num_pairs):
            key = self._text()
            if key in seen:
                raise ValueError(f"key {key!r} is there twice")
            seen.add(key)
            value = self._value()
            if value is not None:
                header.values[key] = value
        header.pairs = (begin, self._at)

        alignment = header.values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}")
        header.tensors = [self._tensor() for _ in range(num_tensors)]
        header.data_start = -(-self._at // alignment) * alignment
        self._check_places(header)
        return header

    def _check_places(self, header: GgufHeader) -> None:
        """Check that the tensors fill the data section in order, as llama.cpp requires."""
        expected: int | None = 0
        names = set()
        for tensor in header.tensors:
            if tensor.name in names:
                raise ValueError(f"tensor {tensor.name!r} is there twice")
            names.add(tensor.name)
            if expected not in (None, tensor.offset):
                raise ValueError(f"tensor {tensor.name!r} is at {tensor.offset}, not {expected}")
            end = header.data_start + tensor.offset + (tensor.nbytes or 0)
            if end > self._size:
                raise ValueError(f"cut short: {self._size:,} of at least {end:,} bytes are there")
            expected = None
            if tensor.nbytes is not None:
                size = -(-tensor.nbytes // header.alignment) * header.alignment
                expected = tensor.offset + size

    def _tensor(self) -> GgufTensor:
        name = self._text()
        num_dimensions = self._uint32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._uint64() for _ in range(num_dimensions))
        kind = self._uint32()
        offset = self._uint64()
        block = BLOCKS.get(kind)
        if block is None:
            return GgufTensor(name, shape, kind, offset, None)
        numbers, size = block
        if shape[0] % numbers:
            raise ValueError(f"tensor {name!r} has rows of {shape[0]} numbers in blocks")
        return GgufTensor(name, shape, kind, offset, math.prod(shape) // numbers * size)

    def _value(self) -> int | float | bool | str | None:
        """Read the value of a metadata pair, or skip it and return None if it is an array."""
        kind = self._uint32()
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            self._skip_array()
            return None
        layout = _layout(kind)
        value: int | float | bool = struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]
        return value

    def _skip_array(self) -> None:
        kind = self._uint32()
        if kind != STRING:
            size = struct.calcsize(_layout(kind))
            self._skip(self._count(size) * size)
            return
        # A vocabulary and its merges have hundreds of thousands of strings, so avoid method calls.
        data = self._data
        unpack = _UINT64.unpack_from
        count = self._count(_UINT64.size)
        at = self._at
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError) as error:
            raise ValueError(f"cut short: {self._size:,} bytes end within a list") from error
        self._skip(at - self._at)

    def _count(self, least: int) -> int:
        """Read the number of items that follow, and check that they fit into the rest of the file.

        Each item takes at least `least` bytes.
        """
        count = self._uint64()
        if count * least > self._size - self._at:
            raise ValueError(f"it claims {count:,} items, for which it has no room")
        return count

    def _text(self) -> str:
        return self._bytes(self._uint64()).decode("utf-8", "replace")

    def _uint32(self) -> int:
        number: int = _UINT32.unpack(self._bytes(4))[0]
        return number

    def _uint64(self) -> int:
        number: int = _UINT64.unpack(self._bytes(8))[0]
        return number

    def _bytes(self, size: int) -> bytes:
        begin = self._at
        self._skip(size)
        return self._data[begin : self._at]

    def _skip(self, size: int) -> None:
        end = self._at + size
        if end > self._size:
            raise ValueError(f"cut short: {self._size:,} of at least {end:,} bytes are there")
        self._at = end


def _layout(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"a value of the unknown type {kind}")
    return SCALARS[kind]
