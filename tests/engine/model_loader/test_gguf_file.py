"""Headers of GGUF files and the parts of those that are split."""

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.model_loader.files import check_files
from ullage_engine.model_loader.gguf_file import (
    BLOCKS,
    check_gguf,
    gguf_parts,
    join_parts,
    read_gguf_header,
)
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import WeightsError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
PART = "model-00002-of-00003.gguf"
LAST = "model-00003-of-00003.gguf"
OTHER = "other-00002-of-00003.gguf"


def write(path: Path, names: str = "abcdef", part_tensors: int = 0) -> list[Path]:
    """A file, or parts, with one small tensor for each letter; the files that were written."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part_tensors)
    writer.add_token_list(["one", "", "three"])
    writer.add_array("scores", [0.5, -2.0])
    writer.add_bool("flag", True)
    for number, name in enumerate(names):
        writer.add_tensor(name, np.full((3, 32), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[list[Path]]:
    written = write(tmp_path / "model.gguf", part_tensors=2)
    assert [each.name for each in written][1:] == [PART, LAST]
    return written


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        check_files(resolve_source(f"file://{path}"))
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message
    return message


def test_sizes_of_blocks_are_the_librarys() -> None:
    sizes = {kind: gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)] for kind in BLOCKS}
    assert sizes == BLOCKS


def test_any_part_stands_for_all(parts: list[Path]) -> None:
    for part in parts:
        files = resolve_source(f"file://{part}")
        assert files.path == parts[0]
        check_files(files)
    headers = check_gguf(parts[0])
    assert [[each.name for each in header.tensors] for header in headers] == [
        *map(list, ("ab", "cd", "ef"))
    ]
    assert gguf_parts(Path("/m/a-00001-of-00001.gguf")) == [Path("/m/a-00001-of-00001.gguf")]


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    assert f"one of 3 parts of a model; missing beside it are {PART}; download all" in refusal(
        parts[0]
    )
    parts[0].unlink()
    message = refusal(parts[2])
    assert f"missing beside it are {parts[0].name}, {PART}; " in message
    assert message.startswith("model.source 'file://")


def rename(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("whole.gguf"))


def swap(parts: list[Path]) -> None:
    first = parts[1].read_bytes()
    second = parts[2].read_bytes()
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)


def duplicate(parts: list[Path]) -> None:
    write(parts[0].with_name("other.gguf"), "xyabzw", part_tensors=2)
    parts[0].with_name(OTHER).replace(parts[1])


def of_fewer(parts: list[Path]) -> None:
    write(parts[0].with_name("other.gguf"), "xyz", part_tensors=1)
    parts[0].with_name(OTHER).replace(parts[1])


def cut_part(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-200])


def dangle(parts: list[Path]) -> None:
    parts[2].unlink()
    parts[2].symlink_to("gone")


def point(parts: list[Path]) -> None:
    parts[2].write_bytes(POINTER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename, ["whole.gguf", "part 1 of 3 by its metadata, and not by its name"]),
        (swap, [PART, "part 3 of 3 by its metadata, not 2 of 3"]),
        (duplicate, [PART, "tensor 'a' is in model-00001-of-00003.gguf, too"]),
        (of_fewer, ["model-00001-of-00003.gguf", "its parts have 5 tensors, and the model 6"]),
        (cut_part, [LAST, "cut short"]),
        (dangle, [LAST, "a link to gone"]),
        (point, [LAST, "Git LFS pointer"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_parts_that_are_not_one_model_are_refused(
    parts: list[Path], change: Callable[[list[Path]], None], words: list[str]
) -> None:
    change(parts)
    message = refusal(parts[0] if parts[0].exists() else parts[0].with_name("whole.gguf"))
    assert [word for word in [*words, "again"][:2] if word not in message] == [], message


def test_parts_become_one_file(parts: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    join_parts(check_gguf(parts[0]), joined)
    (whole,) = write(tmp_path / "whole.gguf")
    found = gguf.GGUFReader(joined)
    expected = gguf.GGUFReader(whole)
    assert [each.name for each in found.tensors] == list("abcdef")
    for own, other in zip(found.tensors, expected.tensors, strict=True):
        assert (own.data == other.data).all()
    for name, field in expected.fields.items():
        if not name.startswith("GGUF."):
            assert found.fields[name].contents() == field.contents(), name


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (POINTER, ["Git LFS pointer to a file of 4,976,698,672 bytes"]),
        (b"", ["not a whole GGUF file", "empty"]),
        (bytes(5000), ["does not begin with GGUF"]),
        (b"<html>", ["an HTML page"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), ["claims 1,152,921,504,606,846,976 items"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), ["claims 1,152,921,504,606,846,976 items"]),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + bytes(90), ["cut short"]),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 60) + bytes(90),
            ["claims 1,152,921,504,606,846,976 items"],
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(90),
            ["unknown type 9"],
        ),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ["version 1; versions (2, 3)"]),
    ],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(
    tmp_path: Path, contents: bytes, words: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    message = refusal(path)
    assert [word for word in [str(path), *words] if word not in message] == [], message


def test_pieces_and_other_kinds_are_told_what_they_are(tmp_path: Path) -> None:
    cases = {
        "m.gguf-split-a": "a piece of a file; join the pieces in their order: cat",
        "m.gguf.part1of2": "a piece of a file",
        "m.gguf.part": "a download that has not ended",
        "model.safetensors": "name its folder, with config.json",
        "pytorch_model.bin": "of PyTorch",
        "model.onnx": "of ONNX",
        "model.zip": "an archive; unpack it",
        "README": "not a .gguf file; name one",
    }
    for name, words in cases.items():
        (tmp_path / name).write_bytes(b"x")
        assert words in refusal(tmp_path / name), name
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "neither a file nor a directory" in refusal(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to("gone.gguf")
    assert "is a link to gone.gguf, which is not there" in refusal(tmp_path / "link.gguf")


def test_a_folder_that_is_no_models_says_where_one_is(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)
    (tmp_path / "snapshots/abc").mkdir(parents=True)
    (tmp_path / "snapshots/abc/config.json").touch()
    assert "snapshots/abc" in refusal(tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/config.json").touch()
    assert f"such as {tmp_path}/inner" in refusal(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert f"such as {tmp_path}/m.gguf" in refusal(tmp_path)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pair = struct.pack("<Q1sIB", 1, b"k", 7, 1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair * 2)
    assert "key 'k' is there twice" in refusal(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_file_is_whole_when_the_library_reads_the_same_of_it(data: st.DataObject) -> None:
    """Whatever is overwritten or cut off; the library itself does not see the end of its file."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write(Path(folder, "model.gguf"), "abc")
        whole = path.read_bytes()
        header = read_gguf_header(path)
        limit = data.draw(st.sampled_from([header.data_start, len(whole)]))
        begin = data.draw(st.integers(0, limit))
        if data.draw(st.booleans()):
            changed = whole[:begin]
        else:
            noise = data.draw(st.binary(min_size=1, max_size=8))
            changed = whole[:begin] + noise + whole[begin + len(noise) :]
        path.write_bytes(changed)
        try:
            header = read_gguf_header(path)
        except WeightsError as error:
            assert "\n" not in str(error)
            assert changed != whole
            return
        try:
            read = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError):
            # It refuses types of tensors that are not known here, and text that is no UTF-8.
            assert changed != whole
            return
        for own, other in zip(header.tensors, read.tensors, strict=True):
            assert own.shape == tuple(other.shape.tolist())
            assert own.kind == other.tensor_type
            assert header.data_start + own.offset == other.data_offset
            assert own.nbytes in (None, other.n_bytes)
