"""Prepared weights: one flat file in the types they are computed with, mapped by every worker.

Preparing reads the checkpoint once, fuses, converts and quantises it; a worker that starts again
only maps the file. Engines that share the folder prepare once: a file lock elects who does it.

The file: magic, length and SHA-256 of the header, the header (JSON), then tensors at aligned
offsets, counted from the file's start.
"""

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.dtypes import DTYPES, dtype_name
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.prepare import PreparedForm, PreparedTensor, open_checkpoint
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import PIECES, Encoding, Packed

MAGIC = b"ULLAGEW1"

LAYOUT_VERSION = 6
"""Version of prepared files; raise it when they change in any way."""

ALIGNMENT = 4096
"""Alignment of every tensor in bytes: a page, so that it can be mapped or sent by itself."""

LOCK_POLL_S = 0.05

STORED_DTYPES = {**DTYPES, "int8": torch.int8, "uint8": torch.uint8}

Progress = Callable[[int, int], None]
"""Callback with (done_bytes, total_bytes)."""

ShardTensor = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Function from a tensor's name and values to what one of several ranks needs of it; None:
nothing."""

ShardModel = Callable[[ModelConfig], ShardTensor]
"""Function from a model's configuration to how the model is cut for one rank."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights ready to compute with; read only."""

    model_config: ModelConfig
    tensors: dict[str, torch.Tensor]
    """Tensors by name; the pieces of a quantised matrix by its name, a dot and theirs."""
    nbytes: int
    """Bytes of the prepared file, which is what mapping or copying it takes."""
    encodings: dict[str, Encoding] = field(default_factory=dict)
    """Encodings of the quantised matrices, by name."""

    def packed(self, name: str) -> Packed:
        """Returns a quantised matrix."""
        encoding, tensors = self.encodings[name], self.tensors
        names = [each for each in PIECES if f"{name}.{each}" in tensors]
        return Packed(encoding, {each: tensors[f"{name}.{each}"] for each in names})


class StoredTensor(msgspec.Struct, frozen=True):
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


class Header(msgspec.Struct, frozen=True):
    """The header of a prepared file."""

    model_config: ModelConfig = msgspec.field(name="geometry")
    nbytes: int
    """Bytes of the whole file."""
    tensors: list[StoredTensor]
    encodings: dict[str, Encoding]


def load_weights(
    model: ModelSection,
    device: torch.device,
    dtype: torch.dtype,
    weights_dir: Path,
    progress: Progress,
    part: ShardModel | None = None,
) -> LoadedModel:
    """Maps the prepared weights, preparing them in `weights_dir` first if nobody has.

    On a CPU the tensors are the file's pages; elsewhere they are copied to the device, one after
    the other. With `part` only what it cuts is; all else said of the model is said of the whole.

    Raises:
        WeightsError: the source is missing, broken or not supported, or the folder is unusable.
    """
    files = resolve_source(model.source)
    form = PreparedForm(dtype, model.quantization, device)
    path = weights_dir / f"{content_key(files, form)}.weights"
    header = _attach(files, path, form, progress)
    progress(header.nbytes, header.nbytes)
    return _map(path, header, device, part)


def content_key(files: ModelFiles, form: PreparedForm) -> str:
    """Hashes what determines the prepared form of exactly these source files."""
    digest = hashlib.sha256(f"{LAYOUT_VERSION} {form.name}\n".encode())
    for path in _source_files(files):
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _source_files(files: ModelFiles) -> list[Path]:
    if files.format == "gguf":
        return [files.path]
    return sorted([*files.path.glob("*.json"), *files.path.glob("*.safetensors")])


def read_header(path: Path) -> Header | None:
    """Reads the header of a prepared file; None if there is no usable one."""
    try:
        with path.open("rb") as file:
            return _parse_header(file, path.stat().st_size)
    except FileNotFoundError:
        return None


def _parse_header(file: BinaryIO, size: int) -> Header | None:
    if file.read(len(MAGIC)) != MAGIC:
        return None
    length = int.from_bytes(file.read(8), "little")
    digest = file.read(32)
    encoded = file.read(length) if length < size else b""
    if hashlib.sha256(encoded).digest() != digest:
        return None
    header = msgspec.json.decode(encoded, type=Header)
    return header if header.nbytes == size else None


def _attach(files: ModelFiles, path: Path, form: PreparedForm, progress: Progress) -> Header:
    """Returns the header of the prepared file, which is written first if need be."""
    try:
        header = read_header(path)
        if header is not None:
            return header
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, progress):
            return read_header(path) or _prepare(files, path, form, progress)
    except OSError as error:
        raise WeightsError(
            f"server.weights_dir {path.parent}: {error.strerror or error}; "
            "name a writable folder with room for the weights"
        ) from error


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the right to prepare `path`; while another engine does, reports that one's progress.

    The kernel drops the lock of a process that dies.
    """
    with path.with_suffix(".lock").open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(*_others_progress(path))
                time.sleep(LOCK_POLL_S)
        yield


def _others_progress(path: Path) -> tuple[int, int]:
    try:
        status = path.with_suffix(".partial").stat()
    except FileNotFoundError:
        return 0, 0
    # The file has its full size from the start; blocks written so far tell how far it is.
    return min(status.st_blocks * 512, status.st_size), status.st_size


def _prepare(files: ModelFiles, path: Path, form: PreparedForm, progress: Progress) -> Header:
    reader = open_checkpoint(files)
    plans = plan_tensors(reader.model_config)
    prepared = [form.prepare(files.path, reader, plan) for plan in plans]
    header, encoded = _lay_out(reader.model_config, prepared)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.truncate(header.nbytes)
            file.write(encoded)
            stored = iter(header.tensors)
            for each in prepared:
                for piece in each.chunks():
                    offset = next(stored).offset
                    progress(offset, header.nbytes)
                    file.seek(offset)
                    _write(file, piece)
            file.flush()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return header


def _write(file: BinaryIO, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _lay_out(model_config: ModelConfig, prepared: list[PreparedTensor]) -> tuple[Header, bytes]:
    """Returns the header and its encoded form, which takes a whole number of pages."""
    room = ALIGNMENT
    while True:
        header = _header(model_config, prepared, room)
        encoded = _encode(header)
        if len(encoded) <= room:
            return header, encoded
        room = _aligned(len(encoded))


def _header(model_config: ModelConfig, prepared: list[PreparedTensor], offset: int) -> Header:
    tensors = []
    for piece in (piece for each in prepared for piece in each.pieces):
        tensors.append(StoredTensor(piece.name, offset, piece.shape, dtype_name(piece.dtype)))
        offset = _aligned(offset + torch.Size(piece.shape).numel() * piece.dtype.itemsize)
    encodings = {each.name: each.encoding for each in prepared if each.encoding is not None}
    return Header(model_config, offset, tensors, encodings)


def _encode(header: Header) -> bytes:
    encoded = msgspec.json.encode(header)
    digest = hashlib.sha256(encoded).digest()
    return MAGIC + len(encoded).to_bytes(8, "little") + digest + encoded


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _map(path: Path, header: Header, device: torch.device, part: ShardModel | None) -> LoadedModel:
    # Private and never written: pages stay shared with every other process that maps the file.
    storage = torch.from_file(str(path), shared=False, size=header.nbytes, dtype=torch.uint8)
    cut: ShardTensor = (
        part(header.model_config) if part is not None else lambda name, tensor: tensor
    )
    placed = {}
    for stored in header.tensors:
        # Cut and placed before the next one, so that copies of parts never fill host memory.
        own = cut(stored.name, _stored(storage, stored))
        if own is not None:
            placed[stored.name] = own.to(device)
    return LoadedModel(header.model_config, placed, header.nbytes, header.encodings)


def _stored(storage: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Returns a view of the file's bytes."""
    dtype = STORED_DTYPES[stored.dtype]
    end = stored.offset + torch.Size(stored.shape).numel() * dtype.itemsize
    return storage[stored.offset : end].view(dtype).view(stored.shape)
