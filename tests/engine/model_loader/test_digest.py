"""A model's digest is that of its content, and a file is read once for it."""

import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ullage_engine.model_loader.digest import Digests, begin, damage_by_name, model_digest
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError


def model_folder(path: Path, *contents: bytes) -> ModelFiles:
    path.mkdir()
    (path / "config.json").write_text("{}")
    for number, content in enumerate(contents, start=1):
        name = f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        save_file({f"codes.{number}": tensor}, path / name)
    return ModelFiles(path, "directory")


def test_copies_in_two_folders_with_other_times_have_one_digest(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one", b"a" * 9_000_000, b"b")
    other = ModelFiles(Path(shutil.copytree(one.path, tmp_path / "other")), "directory")
    for path in other.path.iterdir():
        os.utime(path, (1, 1))
    digests = {model_digest(one, tmp_path / "k1"), model_digest(other, tmp_path / "k2")}
    digests.add(model_digest(other, tmp_path / "k1"))
    assert len(digests) == 1


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_the_digest_changes_with_any_byte(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("digest")
    before = model_digest(model_folder(folder / "one", *contents), folder)
    place = data.draw(st.integers(0, len(contents) - 1))
    changed = [*contents]
    changed[place] = data.draw(
        st.binary(min_size=1, max_size=40).filter(lambda value: value not in contents)
    )
    assert model_digest(model_folder(folder / "other", *changed), folder) != before
    assert model_digest(model_folder(folder / "same", *contents), folder) == before


def test_a_download_that_rots_after_its_first_reading_is_found(tmp_path: Path) -> None:
    """Its size, inode and times stay, so the digest that is kept stands for it."""
    files = model_folder(tmp_path / "model", b"weights")
    kept_in = tmp_path / "kept"
    [weights] = files.path.glob("*.safetensors")
    contents = weights.read_bytes()
    blob = tmp_path / hashlib.sha256(contents).hexdigest()
    rotten = contents[:-1] + b"x"
    blob.write_bytes(rotten)
    weights.unlink()
    weights.symlink_to(blob)
    digest = Digests(kept_in).of(weights)
    [kept] = kept_in.glob("*.digest")
    kept.write_text(blob.name)

    assert damage_by_name(files, kept_in).startswith(
        f"{weights}: its SHA-256 is {digest}, but its name is"
    )
    assert kept.read_text() == digest == hashlib.sha256(rotten).hexdigest()
    blob.write_bytes(contents)
    assert damage_by_name(files, kept_in) == ""


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    first = Digests(tmp_path / "kept")
    digest = first.of(path)
    later = Digests(tmp_path / "kept")
    assert (later.of(path), first.num_read, later.num_read) == (digest, 1, 0)
    before = path.stat()
    path.write_bytes(b"WEIGHTS")  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert later.of(path) != digest
    assert later.num_read == 1


def test_engines_that_start_together_read_a_file_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(20_000_000))
    engines = [Digests(tmp_path / "kept") for _ in range(4)]
    threads = [threading.Thread(target=each.of, args=(path,)) for each in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.num_read for each in engines) == 1


@pytest.mark.parametrize("kept", ["", "abc", "é" * 64])
def test_a_damaged_cache_is_not_believed(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "model.gguf"
    folder = tmp_path / "kept"
    path.write_bytes(b"weights")
    digest = Digests(folder).of(path)
    [cached] = folder.glob("*.digest")
    cached.write_text(kept, encoding="utf-8")
    assert Digests(folder).of(path) == digest
    assert cached.read_text() == digest


def test_a_folder_that_cannot_be_written_costs_a_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    folder = tmp_path / "file"
    path.write_bytes(b"weights")
    folder.write_text("no folder")
    digests = Digests(folder)
    assert digests.of(path) == digests.of(path)
    assert digests.num_read == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"gone\.gguf: No such file"):
        model_digest(ModelFiles(tmp_path / "gone.gguf", "gguf"), tmp_path)


def test_who_waits_hears_the_result_and_the_error(tmp_path: Path) -> None:
    waits: list[None] = []
    go_on = threading.Event()

    def slow() -> str:
        go_on.wait()
        return "digest"

    def on_wait() -> None:
        waits.append(None)
        go_on.set()

    assert begin(slow)(on_wait) == "digest"
    assert len(waits) == 1

    def failing() -> str:
        raise WeightsError("gone")

    with pytest.raises(WeightsError, match="gone"):
        begin(failing)(on_wait)
