"""Where the library computes, and what is said where it cannot."""

import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ullage_engine.native import library


@pytest.fixture
def unloaded() -> Iterator[None]:
    """The library is loaded anew, and once more after the test."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the library is of x86_64"
)
def test_the_library_computes_on_every_processor_with_avx2() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    assert library.load() is not None, "pip install -e . compiles it"
    assert (library.instruction_set() is not None) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx2" in library.instruction_sets()) == ("avx2" in flags)


def test_a_file_that_cannot_be_loaded_is_said_and_leaves_torch(
    unloaded: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As that of another architecture, or on a file system that executes nothing."""
    path = tmp_path / "libullage.so"
    monkeypatch.setattr(library, "PATH", path)
    for is_there, level in ((False, logging.INFO), (True, logging.WARNING)):
        if is_there:
            path.write_bytes(b"\x7fELF, but of no processor")
        library.load.cache_clear()
        with caplog.at_level(logging.INFO):
            assert library.load() is None
        record = caplog.records[-1]
        assert record.levelno == level
        assert str(path) in record.getMessage()
        assert "torch alone" in record.getMessage()


def test_a_workspace_that_is_too_small_is_refused(isa: str) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate": 64}
    model = library.Model(workspace_floats=64, **sizes)
    with pytest.raises(ValueError, match="workspace"):
        library.Team(1, isa).step(model, library.Step())
