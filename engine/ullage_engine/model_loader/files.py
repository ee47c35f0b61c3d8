"""Determines which files in a folder belong to a model, and checks their headers.

This module does not import torch, so that the server process can check the files before it starts a
worker. The worker then reads exactly the files that were checked. The checks do not read tensor
data, so they cannot detect wrong values.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ullage_engine.model_config.hf_config import read_config, read_json
from ullage_engine.model_config.registry import tie
from ullage_engine.model_loader.file_check import check_file, explained
from ullage_engine.model_loader.gguf_file import check_gguf
from ullage_engine.model_loader.source import ModelFiles, other_kind
from ullage_engine.protocol.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"

HEAD = "lm_head.weight"
"""Name of the output projection in Hugging Face checkpoints."""

_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files that the engine reads from a model's folder in addition to the weights."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")

_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes that the safetensors library accepts."""

_MAX_NAMED = 5
"""Maximum number of file names or file numbers to list in an error message."""

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits per element, by safetensors dtype. The safetensors library rejects other dtypes."""

_MAGICS = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, as PyTorch writes",
    b"\x80\x02": "a Python pickle, as PyTorch writes",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "compressed with gzip",
}
"""Magic bytes of other formats, to recognize files that are misnamed as safetensors."""


_TABLE = ".rotary_emb.inv_freq"
"""Name suffix of precomputed rotary embedding tables, which the engine computes itself."""

_PIECE_BYTES = 4 << 20
"""Size in bytes of the chunks in which two files are compared."""


class _Span(NamedTuple):
    """The position, dtype and shape of a tensor in a safetensors file."""

    begin: int
    end: int
    name: str
    kind: str
    shape: tuple[int, ...]


class Contradictions(NamedTuple):
    """Error messages for tensors on which a model's files contradict each other, by tensor name."""

    missing: dict[str, str]
    """Errors for tensors that are missing from the file to which the index assigns them."""
    ambiguous: dict[str, str]
    """Errors for tensors whose contents differ between two files.

    A tensor is left out if the index assigns it to the last file that contains it.
    """


def check_files(files: ModelFiles, *, reads_weights: bool = True) -> None:
    """Check that a model's files are present, readable and complete, without reading tensor data.

    Args:
        files: the model's folder or GGUF file.
        reads_weights: whether to also check the weights of a folder. If False, only the other files
            are checked.

    Raises:
        WeightsError: a check failed. The message names the file, the cause and the remedy.
    """
    if files.format == "gguf":
        check_gguf(files.path)
        return
    for name in _BESIDE:
        path = files.path / name
        if os.path.lexists(path):
            check_file(path)
    if reads_weights:
        weight_files(files.path)


def check_for_vllm(files: ModelFiles, args: Mapping[str, object]) -> None:
    """Check a model's files before vLLM loads them with these arguments.

    Without an index, vLLM reads every safetensors file in a folder, so the folder must not contain
    unrelated ones. Because it is unknown which tensors vLLM reads, the files must agree about every
    tensor. The only exception is the output projection, which may be missing if the model can use
    the embedding instead.

    Raises:
        WeightsError: `check_files` fails, tensors are ambiguous, or the folder has unrelated files.
    """
    is_chosen = "load_format" in args
    check_files(files, reads_weights=not is_chosen)
    folder = files.path
    if files.format == "gguf" or is_chosen:
        return

    doubtful = contradictions(folder)
    for reason in doubtful.ambiguous.values():
        raise WeightsError(reason)
    for name, reason in doubtful.missing.items():
        if name.endswith(_TABLE):
            continue
        if name != HEAD and not name.endswith(f".{HEAD}"):
            raise WeightsError(reason)
        if not _may_be_tied(folder):
            raise WeightsError(
                f"model.source: {reason}, or set tie_word_embeddings to true in config.json where "
                "the output projection is the embedding"
            )
    if (folder / INDEX).is_file():
        return

    counted = {path.name for path in weight_files(folder)}
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in counted)
    if others:
        raise WeightsError(
            f"{folder}: vLLM would read {_named(others)} beside {_named(sorted(counted))}; move "
            f"what is not the model's out of the folder, or write {INDEX}"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, sorted by name.

    As in transformers and vLLM, the files listed by the folder's index are used if there is an
    index, and `model.safetensors` otherwise. If neither exists, the folder must contain a single
    safetensors file or one complete set of files `NAME-00001-of-0000N`. Ambiguous folders are
    refused. Each file's header is read to check that the file is complete.

    Raises:
        WeightsError: files are missing, broken or ambiguous.
    """
    named = _named_files(folder)
    paths = _listed(folder) if named is None else _indexed(folder, named)
    for path in paths:
        read_safetensors_header(path)
    return paths


def contradictions(folder: Path) -> Contradictions:
    """Return error messages for the tensors on which a model's files contradict each other.

    The caller decides which of these tensors matter, because a contradiction about an unused tensor
    is harmless. The index says which file holds each tensor. However, if several files contain a
    tensor, transformers ignores the index and reads the tensor from the last file. The tensor's
    contents must therefore be equal in all files, unless the index points to the last file as well.

    Raises:
        WeightsError: files are missing, broken or ambiguous. See `weight_files`.
    """
    named = _named_files(folder)
    paths_of: dict[str, list[Path]] = {}
    for path in weight_files(folder):
        for name in read_safetensors_header(path):
            paths_of.setdefault(name, []).append(path)

    missing = {
        name: f"{folder / INDEX}: tensor {name!r} is said to be in {file}, which lacks it; these "
        "are files of different checkpoints, so download the model again"
        for name, file in (named or {}).items()
        if folder / file not in paths_of.get(name, [])
    }

    ambiguous = {}
    for name, paths in paths_of.items():
        if (named or {}).get(name) == paths[-1].name:
            continue
        if other := next((path for path in paths if not _have_same(name, path, paths[-1])), None):
            ambiguous[name] = (
                f"{folder}: tensor {name!r} is in both {other.name} and {paths[-1].name}, with "
                "different contents; these are files of different checkpoints, so download the "
                "model again"
            )
    return Contradictions(missing, ambiguous)


def read_safetensors_header(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file.

    The tensors must fill the file's data section without gaps.

    Raises:
        WeightsError: the file cannot be read, is truncated or is not a safetensors file.
    """
    return [span.name for span in _read_spans(path)]


def _read_spans(path: Path) -> list[_Span]:
    """Return the spans of all tensors in a safetensors file, with offsets from the file start."""
    size = check_file(path)
    with explained(path), path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        _check_length(path, start, length, size)
        file.seek(8)
        encoded = file.read(length)
    spans = _spans(path, _decode(path, encoded))

    expected = 0
    for span in sorted(spans):
        if span.begin != expected:
            raise _damaged(path, f"tensor {span.name!r} begins at {span.begin}, not {expected}")
        expected = span.end
    whole = 8 + length + expected
    if size < whole:
        raise WeightsError(
            f"{path}: cut short: {size:,} of {whole:,} bytes are there; download it again"
        )
    if size > whole:
        raise _damaged(path, f"{size - whole:,} bytes follow the last tensor")
    data = 8 + length
    return [each._replace(begin=data + each.begin, end=data + each.end) for each in spans]


def _have_same(name: str, path: Path, other: Path) -> bool:
    """Return whether two files contain the same bytes, dtype and shape for a tensor."""
    if path == other:
        return True
    one, two = (
        next(span for span in _read_spans(each) if span.name == name) for each in (path, other)
    )
    if (one.kind, one.shape) != (two.kind, two.shape):
        return False

    with explained(path), path.open("rb") as first, other.open("rb") as second:
        first.seek(one.begin)
        second.seek(two.begin)
        num_unread = one.end - one.begin
        while num_unread:
            size = min(num_unread, _PIECE_BYTES)
            if first.read(size) != second.read(size):
                return False
            num_unread -= size
    return True


def _may_be_tied(folder: Path) -> bool:
    """Return whether the model may use the embedding as its output projection.

    Some model families that only vLLM serves, such as Gemma, tie the projection to the embedding by
    default, and their config.json may omit the setting. If such a model turns out not to be tied,
    vLLM itself refuses to serve it without the projection's tensor.
    """
    config = read_config(folder)
    text = config.get("text_config")
    texts = [config, config.section("text_config")] if isinstance(text, dict) else [config]
    ties = [tie(each) for each in texts]
    return True in ties or False not in ties


def _named_files(folder: Path) -> dict[str, str] | None:
    """Return the folder's index, which maps tensor names to file names, or None if it has none."""
    index = folder / INDEX
    return _read_index(index) if os.path.lexists(index) else None


def _read_index(index: Path) -> dict[str, str]:
    """Read the index, which maps tensor names to file names."""
    check_file(index)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise WeightsError(f"{index}: no 'weight_map'; download the model again")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise WeightsError(f"{index}: {name!r} is no file of this folder; check the source")
    return names


def _indexed(folder: Path, named: dict[str, str]) -> list[Path]:
    files = sorted(set(named.values()))
    if SINGLE not in files and os.path.lexists(folder / SINGLE):
        raise WeightsError(
            f"{folder}: {SINGLE} and the files of {INDEX} are two checkpoints; remove the one that "
            "is not the model's"
        )
    missing = [name for name in files if not os.path.lexists(folder / name)]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise WeightsError(
            f"{folder}: {_named(missing)} {are} missing, of the {len(files)} files that {INDEX} "
            "names; download the model again"
        )
    return [folder / name for name in files]


def _listed(folder: Path) -> list[Path]:
    """Choose a model's weight files by their names, in a folder that has no index.

    Raises:
        WeightsError: files are missing or ambiguous, or the folder cannot be read.
    """
    with explained(folder):
        names = sorted(os.listdir(folder))
    if SINGLE in names:
        return [folder / SINGLE]
    files = [name for name in names if name.endswith(".safetensors") and name != ADAPTER]
    if not files:
        raise _without_weights(folder, names)
    shards = [match for name in files if (match := _SHARD.fullmatch(name))]
    sets = {(match["stem"], int(match["count"])) for match in shards}
    if len(shards) == len(files) and len(sets) == 1:
        return [folder / name for name in _whole_set(folder, files, sets.pop()[1])]
    if len(files) > 1:
        raise WeightsError(
            f"{folder}: {_named(files)} are here, and no {INDEX} says which are the model's; "
            "download the index, or remove all other files from the folder"
        )
    return [folder / files[0]]


def _whole_set(folder: Path, files: Sequence[str], count: int) -> Sequence[str]:
    """Return all files of a checkpoint that is split into files named `NAME-00001-of-0000N`.

    Raises:
        WeightsError: a file is missing, or the folder has other files.
    """
    present = {int(match["number"]) for name in files if (match := _SHARD.fullmatch(name))}
    missing = [number for number in range(1, count + 1) if number not in present]
    if missing or len(files) != count:
        numbers = ", ".join(map(str, missing[:_MAX_NAMED])) or "none"
        raise WeightsError(
            f"{folder}: {len(files)} of {count} files are there, such as {files[0]}; missing are "
            f"the numbers {numbers}; download the model again"
        )
    return files


def _without_weights(folder: Path, names: Sequence[str]) -> WeightsError:
    for name in names:
        if name == ADAPTER:
            return WeightsError(
                f"{folder}: {name} is an adapter without its model; name the model's folder, and "
                "this one in spec.adapters"
            )
        if kind := other_kind(folder / name):
            return WeightsError(f"{folder}: no .safetensors file, but {name}, {kind}")
    return WeightsError(f"{folder}: no .safetensors file; download the model again")


def _check_length(path: Path, start: bytes, length: int, size: int) -> None:
    """Check that a header's length is plausible before allocating memory for it.

    Args:
        path: the file.
        start: first bytes of the file, which are the encoded length and the header's first byte.
        length: the decoded length.
        size: size of the file in bytes.
    """
    for magic, kind in _MAGICS.items():
        # The length 640 has the same first bytes as a pickle.
        if start.startswith(magic) and not start.endswith(b"{"):
            raise WeightsError(f"{path}: {kind}, and no safetensors; download it again")
    if len(start) < 8:
        raise WeightsError(f"{path}: cut short: it has {size} bytes; download it again")
    if length == 0:
        raise WeightsError(
            f"{path}: it begins with zeros, as an unfinished download does; download it again"
        )
    if length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"it claims a header of {length:,} bytes")
    if length > size - 8:
        raise WeightsError(
            f"{path}: cut short: its header takes {length:,} bytes, and {size - 8:,} are there; "
            "download it again"
        )


def _decode(path: Path, encoded: bytes) -> dict[str, object]:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a name is there twice")
        return values

    try:
        header = json.loads(encoded, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    return header


def _spans(path: Path, header: dict[str, object]) -> list[_Span]:
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        values = entry if isinstance(entry, dict) else {}
        kind, shape, place = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(kind, str) and _are_sizes(shape) and _are_sizes(place)):
            raise _damaged(path, f"tensor {name!r} lacks its type, shape or place")
        assert isinstance(shape, list)
        assert isinstance(place, list)
        if len(place) != 2 or place[0] > place[1]:
            raise _damaged(path, f"tensor {name!r} is at {place}")
        bits = _BITS.get(kind)
        if bits is not None and math.prod(shape) * bits != (place[1] - place[0]) * 8:
            raise _damaged(
                path, f"tensor {name!r} of {kind} {shape} takes {place[1] - place[0]:,} bytes"
            )
        spans.append(_Span(place[0], place[1], name, kind, tuple(shape)))
    return spans


def _are_sizes(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(each) is int and each >= 0 for each in value)


def _damaged(path: Path, reason: str) -> WeightsError:
    line = " ".join(reason.split())
    return WeightsError(f"{path}: not a whole safetensors file ({line}); download it again")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
