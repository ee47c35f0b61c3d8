"""A folder without room for the weights is refused before anything is written to it."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader import room as room_module
from ullage_engine.model_loader.loader import load_weights
from ullage_engine.model_loader.room import MARGIN_BYTES, Room, refuse, room_of
from ullage_engine.protocol.errors import WeightsError

MIB = 1 << 20
MEMORY = Path("/dev/shm")
Save = Callable[..., tuple[Any, Path]]

needs_tmpfs = pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="needs a tmpfs")


def test_what_fits_with_the_margin_is_taken() -> None:
    size = 100 * MIB
    enough = size + MARGIN_BYTES
    scarce = size + MARGIN_BYTES - 1
    for room in (Room(enough, None), Room(enough, enough), Room(None, None), Room(None, enough)):
        assert refuse(room, size) == "", room
    for room in (Room(scarce, None), Room(scarce, enough)):
        assert "need 116 MiB, but 116 MiB are free there; name a folder" in refuse(room, size), room
    for room in (Room(enough, scarce), Room(None, scarce)):
        told = refuse(room, size)
        assert "the folder is in memory (tmpfs)" in told, room
        assert "raise the memory limit" in told, room


@needs_tmpfs
def test_the_rooms_of_a_disk_and_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "free_bytes", lambda: 5 * MIB)
    in_memory = room_of(MEMORY)
    assert in_memory.memory == 5 * MIB
    if tmp_path.stat().st_dev != MEMORY.stat().st_dev:
        assert room_of(tmp_path).memory is None
    status = os.statvfs(tmp_path)
    free = room_of(tmp_path).free
    assert free is not None
    assert 0 < free <= status.f_blocks * status.f_frsize


def test_a_file_system_that_does_not_say_its_size_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: silent)
    assert room_of(tmp_path).free is None


def test_weights_are_not_begun_where_they_do_not_fit(
    save_llama: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = save_llama()
    section = ModelSection(source=f"file://{source}", name="test")
    folder = tmp_path / "prepared"
    progress: list[tuple[int, int]] = []

    def load() -> None:
        load_weights(
            section,
            torch.device("cpu"),
            torch.float32,
            folder,
            lambda done, total: progress.append((done, total)),
        )

    full = SimpleNamespace(f_blocks=1000, f_bavail=3 * MIB // 4096, f_frsize=4096)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        told = rf"^server\.weights_dir {folder}: .*need \d+ MiB, but 3 MiB are free there; "
        with pytest.raises(WeightsError, match=told):
            load()
    assert not progress
    assert [path.suffix for path in folder.iterdir()] == [".lock"]

    load()
    [path] = folder.glob("*.weights")
    path.rename(path.with_suffix(".partial"))  # as of a process that was killed
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(WeightsError):
            load()
    assert not list(folder.glob("*.partial")), "its room counts as free"
