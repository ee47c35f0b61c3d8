"""Prepared weights: one flat file of tensors that are ready for use, which workers memory-map.

On the first start, the engine reads the checkpoint, fuses, converts and quantises its tensors, and
writes the prepared file. Restarted workers just map this file read-only. If several engines share
the folder, a file lock ensures that only one of them prepares the file.

The file consists of a magic number, the length and SHA-256 of the header, the header (JSON), and
the tensors at aligned offsets from the file's start. The header contains a checksum for each
tensor. The checksums are verified when the file is first mapped after the machine boots or the file
changes.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import torch

from ullage_common.config.engine import ModelSection
from ullage_common.process.cores import usable_cores
from ullage_engine.model_config.dtypes import DTYPES, dtype_name
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.digest import begin, damage_by_name
from ullage_engine.model_loader.gguf_file import gguf_parts
from ullage_engine.model_loader.prepare import (
    Calibration,
    CalibrationError,
    PreparedForm,
    PreparedTensor,
    open_checkpoint,
    rounded_tensors,
)
from ullage_engine.model_loader.room import check_room
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.model_loader.upload import as_bytes, placing
from ullage_engine.protocol.errors import ProofError, WeightsError, one_line
from ullage_engine.quantization.formats import PIECES, Encoding, Packed

log = logging.getLogger("ullage.engine.weights")

MAGIC = b"ULLAGEW1"

LAYOUT_VERSION = 12
"""Version of the prepared file format. Increment it whenever the content or layout changes."""

ALIGNMENT = 4096
"""Alignment of every tensor in bytes. It is one page, so that tensors can be mapped or sent
individually."""

LOCK_POLL_S = 0.05

_MAX_COPIES = 4
"""Maximum number of threads that copy tensors from a device in parallel to verify them."""

_SLICE_BYTES = 64 << 20
"""Size in bytes of the chunks in which a tensor is copied from a device or hashed."""

STORED_DTYPES = {**DTYPES, "int8": torch.int8, "uint8": torch.uint8}

Progress = Callable[[int, int], None]
"""Callback that receives (done_bytes, total_bytes)."""


class Shard(Protocol):
    """Protocol for selecting one rank's part of the prepared weights.

    The shard says which slice of each stored tensor the rank needs, and how the slices are encoded.
    """

    encodings: dict[str, Encoding]
    """Encodings of the rank's quantised matrices, by name."""

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the rank's slice of a stored tensor, or None if the rank does not need it."""
        ...


ShardModel = Callable[[ModelConfig, dict[str, Encoding]], Shard]
"""Function that returns one rank's shard, given a model's configuration and encodings."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's prepared weights, loaded for read-only use."""

    model_config: ModelConfig
    tensors: dict[str, torch.Tensor]
    """Tensors by name. A quantised matrix consists of several tensors, such as `MATRIX.scales`."""
    nbytes: int
    """Size of the prepared file in bytes, which is also the memory needed to map or copy it."""
    encodings: dict[str, Encoding] = field(default_factory=dict)
    """Encodings of the quantised matrices, by name."""
    key: str = ""
    """Key of the prepared file, which identifies the source files and how they were prepared."""
    content: str = ""
    """Digest of all values, shapes and encodings. Engines with the same weights have the same
    digest."""

    def packed(self, name: str) -> Packed:
        """Return a quantised matrix by name, assembled from its tensors."""
        encoding = self.encodings[name]
        tensors = self.tensors
        names = [each for each in PIECES if f"{name}.{each}" in tensors]
        return Packed(encoding, {each: tensors[f"{name}.{each}"] for each in names})


class StoredTensor(msgspec.Struct, frozen=True):
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    checksum: str = "0" * 64
    """SHA-256 of the tensor's bytes, in hexadecimal."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * STORED_DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Header(msgspec.Struct, frozen=True):
    """The header of a prepared file."""

    model_config: ModelConfig = msgspec.field(name="geometry")
    nbytes: int
    """Size of the whole file in bytes."""
    tensors: list[StoredTensor]
    encodings: dict[str, Encoding]

    @property
    def content(self) -> str:
        """Digest that identifies the weights: all values, shapes and encodings.

        File offsets are left out, so files that hold the same weights have the same digest.
        """
        tensors = [msgspec.structs.replace(each, offset=0) for each in self.tensors]
        return hashlib.sha256(msgspec.json.encode([tensors, self.encodings])).hexdigest()


def load_weights(
    model: ModelSection,
    device: torch.device,
    dtype: torch.dtype,
    weights_dir: Path,
    progress: Progress,
    shard: ShardModel | None = None,
    calibration: Calibration | None = None,
) -> LoadedModel:
    """Load the prepared weights from `weights_dir`, preparing them first if necessary.

    On a CPU, the tensors are views of the file's read-only mapping, so writing to them kills the
    process. On other devices, the tensors are copied one by one, and progress is reported after
    each tensor.

    If calibration fails for any layer, all weights are rounded to nearest instead, and a warning is
    logged. These weights are stored in `weights_dir` as well, so that a restarted worker starts
    fast and resumes open streams with the same weights.

    Args:
        model: the `model` section of the configuration, with the source and the quantisation.
        device: the device to place the weights on.
        dtype: the computing dtype.
        weights_dir: folder of the prepared file.
        progress: called with the number of bytes done so far.
        shard: selects one rank's part. The returned configuration and size still describe the whole
            model.
        calibration: calibration method for rounding weights to int4, or None to round every weight
            to nearest.

    Raises:
        WeightsError: the source is missing, broken or not supported, or the folder is unusable.
    """
    files = replace(resolve_source(model.source), allows_unknown=model.allow_unknown_config)
    form = PreparedForm(dtype, model.quantization, device)
    if form.quantization != "int4":
        calibration = None
    path, header = _attach(files, weights_dir, form, progress, calibration)
    loaded = _place(path, header, device, shard, progress)
    progress(header.nbytes, header.nbytes)
    return loaded


def check_loaded(
    loaded: LoadedModel,
    weights_dir: Path,
    progress: Progress,
    shard: ShardModel | None = None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Compare weights in memory with the checksums in the prepared file.

    If a tensor differs, the next start verifies the file before using it, and prepares it again if
    it is damaged.

    Args:
        loaded: the weights.
        weights_dir: folder of the prepared file.
        progress: called with the number of bytes compared so far.
        shard: selects one rank's part. In this case, each rank verifies the checksums of an equal
            part of the file's tensors, and compares its own weights with the file.
        rank: this rank.
        num_ranks: number of ranks that share the check.

    Raises:
        ProofError: a tensor differs.
    """
    path = weights_dir / f"{loaded.key}.weights"
    header = read_header(path)
    if header is None:
        name = "the header"
    elif shard is None:
        name = _differing_tensor(loaded, header, progress)
    else:
        name = _differing_part(
            path, header, loaded, shard, header.tensors[rank::num_ranks], progress
        )
    if not name:
        return

    # A read-only folder has no marker, so its files are compared at every start.
    with contextlib.suppress(OSError):
        _marker_path(path).unlink(missing_ok=True)
    raise ProofError(
        f"{path}: {name} in memory does not match its checksum; the next start reads the whole "
        "file and prepares it again if it is damaged; if every start ends like this, look for "
        "faulty memory, or delete the file"
    )


def content_key(
    files: ModelFiles, form: PreparedForm, calibration: Calibration | None = None
) -> str:
    """Compute the prepared file's key from everything that determines its content."""
    rounding = calibration.name if calibration else "nearest"
    # A start that refuses unknown keys must not map a file that was prepared while they were
    # allowed.
    unknown = " unknown" if files.allows_unknown else ""
    return source_key(files, f"{LAYOUT_VERSION} {form.name} {rounding}{unknown}")


def source_key(files: ModelFiles, use: str) -> str:
    """Compute a key from the source files' paths, sizes and modification times.

    `use` says what the files are used for. It is part of the key, so that different uses of the
    same files have different keys.
    """
    digest = hashlib.sha256(f"{use}\n".encode())
    for path in _source_files(files):
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def check_unchanged(files: ModelFiles, key: str, key_before: str) -> None:
    """Check that the source files did not change while they were read.

    Raises:
        WeightsError: the key has changed, so the data may be a mix of two versions.
    """
    if key != key_before:
        raise WeightsError(
            f"{files.path}: its files changed while they were read; start again when they no "
            "longer change"
        )


def _source_files(files: ModelFiles) -> list[Path]:
    if files.format == "gguf":
        paths = gguf_parts(files.path)
    else:
        paths = sorted([*files.path.glob("*.json"), *files.path.glob("*.safetensors")])
    # If a necessary file is missing, its reader raises an error with a remedy.
    return [path for path in paths if path.is_file()]


def read_header(path: Path) -> Header | None:
    """Read the header of a prepared file. Return None if the file is missing or unusable."""
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


def _attach(
    files: ModelFiles,
    weights_dir: Path,
    form: PreparedForm,
    progress: Progress,
    calibration: Calibration | None,
) -> tuple[Path, Header]:
    """Find an intact prepared file, or write one, and return its path and header.

    A lock ensures that only one process writes the file. The others wait, and then use it.
    """
    keys = dict.fromkeys(content_key(files, form, each) for each in (calibration, None))
    paths = [weights_dir / f"{key}.weights" for key in keys]
    try:
        attached = _find(paths, progress)
        if attached is None:
            weights_dir.mkdir(parents=True, exist_ok=True)
            with _lock(paths, progress):
                attached = _find(paths, progress)
                if attached is None:
                    attached = _prepare_either(files, paths[0], form, progress, calibration)
        return attached
    except OSError as error:
        raise WeightsError(
            f"server.weights_dir {weights_dir}: {error.strerror or error}; "
            "name a writable folder with room for the weights"
        ) from error


def _find(paths: list[Path], progress: Progress) -> tuple[Path, Header] | None:
    """Return the path and header of the first intact prepared file, or None if none is intact.

    The second path, if any, is the file with int4 weights that were rounded to nearest because
    calibration failed.
    """
    for path in paths:
        header = _verified_header(path, progress)
        if header is None:
            continue
        if path != paths[0]:
            log.warning(
                "int4 weights are uncalibrated and rounded to the nearest numbers, as when %s was "
                "written; "
                "the next start with an empty weights folder tries again",
                path,
            )
        return path, header
    return None


def _prepare_either(
    files: ModelFiles,
    path: Path,
    form: PreparedForm,
    progress: Progress,
    calibration: Calibration | None,
) -> tuple[Path, Header]:
    """Write the prepared file, and fall back to rounding to nearest if calibration fails.

    Calibrated weights are written to `path`, and fallback weights to a different file. The caller
    holds the lock for `path`. When another process gets the lock afterwards, it finds one of the
    two files and need not prepare the weights again.
    """
    try:
        return path, _prepare(files, path, form, progress, calibration)
    except CalibrationError as error:
        reason = str(error)
        remedy = error.remedy
    # This is outside the handler, since the exception's frames keep the layer's tensors alive.
    log.warning(
        "int4 weights are uncalibrated and rounded to the nearest numbers, %s: %s; "
        "the next start with an empty weights folder (%s) tries again",
        remedy,
        reason,
        path.parent,
    )
    return _attach(files, path.parent, form, progress, None)


def _verified_header(path: Path, progress: Progress) -> Header | None:
    """Return the header of a prepared file, or None if the file is missing or damaged."""
    header = read_header(path)
    if header is None or _read_marker(path) == _marker(path):
        return header
    name = _damaged_tensor(path, header, progress)
    if name is not None:
        log.warning("%s: tensor %s is damaged; preparing the weights again", path, name)
        return None
    _mark_verified(path)
    return header


def _damaged_tensor(path: Path, header: Header, progress: Progress) -> str | None:
    """Return the name of the file's first tensor whose checksum is wrong, or None if all match."""

    def is_whole(stored: StoredTensor) -> bool:
        with view[stored.offset : stored.end] as data:
            return hashlib.sha256(data).hexdigest() == stored.checksum

    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        verdicts = threads.map(is_whole, header.tensors)
        for stored, whole in zip(header.tensors, verdicts, strict=True):
            if not whole:
                return stored.name
            progress(stored.offset, header.nbytes)
    return None


def _differing_tensor(loaded: LoadedModel, header: Header, progress: Progress) -> str:
    """Return the name of the first tensor in memory whose checksum is wrong, or "" if all match."""

    def is_whole(stored: StoredTensor) -> bool:
        digest = hashlib.sha256()
        for piece in torch.split(as_bytes(loaded.tensors[stored.name]), _SLICE_BYTES):
            digest.update(piece.cpu().numpy().data)
            report(len(piece))
        return digest.hexdigest() == stored.checksum

    report = _counted(progress, sum(stored.nbytes for stored in header.tensors))
    is_copied = any(tensor.device.type != "cpu" for tensor in loaded.tensors.values())
    cores = usable_cores()
    with ThreadPoolExecutor(min(cores, _MAX_COPIES) if is_copied else cores) as threads:
        verdicts = threads.map(is_whole, header.tensors)
        whole = zip(header.tensors, verdicts, strict=True)
        return next((stored.name for stored, is_right in whole if not is_right), "")


def _differing_part(
    path: Path,
    header: Header,
    loaded: LoadedModel,
    shard: ShardModel,
    hashed: Sequence[StoredTensor],
    progress: Progress,
) -> str:
    """Return the name of the first tensor that fails this rank's check, or "" if all pass.

    The checksums of the tensors in `hashed` are verified against the file's data. The rank's
    tensors in memory are then compared with the file.
    """
    own = shard(header.model_config, header.encodings)
    storage = _map(path)
    total = sum(stored.nbytes for stored in (*hashed, *header.tensors))
    report = _counted(progress, total)
    for stored in hashed:
        digest = hashlib.sha256()
        for piece in torch.split(storage[stored.offset : stored.end], _SLICE_BYTES):
            digest.update(piece.numpy().data)
            report(len(piece))
        if digest.hexdigest() != stored.checksum:
            return stored.name

    for stored in header.tensors:
        part = own.part(stored.name, _stored(storage, stored))
        if part is not None and not _are_equal(part, loaded.tensors[stored.name]):
            return stored.name
        report(stored.nbytes)
    return ""


def _are_equal(part: torch.Tensor, placed: torch.Tensor) -> bool:
    """Return whether a tensor from the file and a tensor in memory have the same bytes."""
    one = as_bytes(part.contiguous())
    other = as_bytes(placed.contiguous())
    if len(one) != len(other):
        return False
    pieces = zip(torch.split(one, _SLICE_BYTES), torch.split(other, _SLICE_BYTES), strict=True)
    return all(torch.equal(piece, copy.cpu()) for piece, copy in pieces)


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that adds up the sizes of finished pieces and reports their sum.

    Call the function with the size of each piece in bytes. It passes the running sum to `progress`,
    and is thread-safe.
    """
    lock = threading.Lock()
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    report(0)
    return report


def _marker_path(path: Path) -> Path:
    return path.with_suffix(".verified")


def _marker(path: Path) -> str:
    """Return a string that changes whenever the machine reboots or the file is modified.

    It is stored once the file's checksums have been verified. While it stays the same, later starts
    need not verify them again.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    status = path.stat()
    return f"{boot_id} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read_marker(path: Path) -> str:
    try:
        return _marker_path(path).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


def _mark_verified(path: Path) -> None:
    # The folder may be read-only. Then its files are verified at every start.
    with contextlib.suppress(OSError):
        _marker_path(path).write_text(_marker(path), encoding="ascii")


@contextmanager
def _lock(paths: list[Path], progress: Progress) -> Iterator[None]:
    """Hold the lock for preparing `paths`. While waiting, report the lock holder's progress.

    The kernel releases the lock if the process dies.
    """
    with paths[0].with_suffix(".lock").open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(*_others_progress(paths))
                time.sleep(LOCK_POLL_S)
        yield


def _others_progress(paths: list[Path]) -> tuple[int, int]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.with_suffix(".partial").stat()
            # The file has its full size from the start. The allocated blocks show the progress.
            return min(status.st_blocks * 512, status.st_size), status.st_size
    return 0, 0


def _prepare(
    files: ModelFiles,
    path: Path,
    form: PreparedForm,
    progress: Progress,
    calibration: Calibration | None,
) -> Header:
    with _foreseen(files):
        reader = open_checkpoint(files)
        plans = plan_tensors(reader.model_config)
        prepared = [form.prepare(files.path, reader, plan) for plan in plans]
    _warn_rounded_twice(prepared, form)
    header = lay_out(reader.model_config, prepared)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    check_room(path.parent, header.nbytes)
    wait = begin(lambda: damage_by_name(files, path.parent))
    if damage := wait(lambda: progress(0, header.nbytes)):
        raise WeightsError(damage)
    offset = 0
    round_layer = None
    if calibration:
        round_layer = calibration.begin(
            files,
            prepared,
            reader.model_config,
            form.device,
            lambda: progress(offset, header.nbytes),
        )
    try:
        with partial.open("wb") as file:
            file.truncate(header.nbytes)
            written = []
            stored = iter(header.tensors)
            for each, rounded in rounded_tensors(prepared, round_layer):
                for piece in each.chunks(rounded):
                    tensor = next(stored)
                    offset = tensor.offset
                    progress(offset, header.nbytes)
                    file.seek(tensor.offset)
                    checksum = _write(file, piece)
                    written.append(msgspec.structs.replace(tensor, checksum=checksum))
            header = msgspec.structs.replace(header, tensors=written)
            file.seek(0)
            file.write(_encode(header))
            file.flush()
            check_unchanged(files, content_key(files, form, calibration), path.stem)
            # The file is on the disk before it gets its name. So a power loss leaves either no
            # file or a complete one.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    _mark_verified(path)
    return header


@contextmanager
def _foreseen(files: ModelFiles) -> Iterator[None]:
    """Turn unexpected errors while reading a model's files into a `WeightsError`.

    The message tells the user to download the model again. Restarting would not help, because it
    would read the same files. WeightsError, OSError and MemoryError are passed on unchanged.
    """
    try:
        yield
    except (WeightsError, OSError, MemoryError):
        raise
    except Exception as error:
        log.debug("%s cannot be read", files.path, exc_info=True)
        raise WeightsError(
            f"{files.path}: its files cannot be read: {one_line(error)}; download the model again"
        ) from error


def _warn_rounded_twice(prepared: list[PreparedTensor], form: PreparedForm) -> None:
    matrices = [each for each in prepared if each.rounded_kinds]
    if matrices:
        kinds = sorted(set().union(*(each.rounded_kinds for each in matrices)))
        log.warning(
            "model.quantization %s rounds %d matrices a second time, which the file has as %s; "
            "set auto or int4 to keep their blocks, or use the unquantised model",
            form.quantization,
            len(matrices),
            ", ".join(kinds),
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, tensors: Iterable[torch.Tensor]) -> str:
    """Write tensors back to back, and return the SHA-256 of all their bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data = as_bytes(tensor.contiguous()).numpy().data
        digest.update(data)
        file.write(data)
    return digest.hexdigest()


def lay_out(model_config: ModelConfig, prepared: list[PreparedTensor]) -> Header:
    """Assign file offsets to all tensors, and return a header without checksums."""
    room = ALIGNMENT
    while True:
        header = _header(model_config, prepared, room)
        size = len(_encode(header))
        if size <= room:
            return header
        room = _aligned(size)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of tensors in bytes, with each tensor rounded up to whole pages."""
    return sum(_aligned(each.nbytes) for each in tensors)


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


def _place(
    path: Path,
    header: Header,
    device: torch.device,
    shard: ShardModel | None,
    progress: Progress,
) -> LoadedModel:
    """Load the file's tensors, or one rank's slices of them, onto the device."""
    storage = _map(path)
    own = shard(header.model_config, header.encodings) if shard is not None else None
    is_copied = device.type != storage.device.type

    placed = {}
    with placing(device) as place:
        for stored in header.tensors:
            # Cut and place one tensor after another, so that copies of parts never fill host
            # memory.
            tensor = _stored(storage, stored)
            part = tensor if own is None else own.part(stored.name, tensor)
            if part is not None:
                placed[stored.name] = place(part)
            if is_copied:
                progress(stored.end, header.nbytes)

    encodings = header.encodings if own is None else own.encodings
    return LoadedModel(
        header.model_config, placed, header.nbytes, encodings, path.stem, header.content
    )


def _map(path: Path) -> torch.Tensor:
    """Memory-map a file, so that all processes that map it share the memory.

    The mapping is read-only. A private writable mapping would hide stray writes, and the kernel
    would refuse it if it exceeded memory and swap (vm.overcommit_memory 0).
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # torch has no read-only tensors, so it warns that a write would change this buffer.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _stored(storage: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return a stored tensor as a view of the file's mapped bytes."""
    data = storage[stored.offset : stored.end]
    return data.view(STORED_DTYPES[stored.dtype]).view(stored.shape)
