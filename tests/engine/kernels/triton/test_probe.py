"""One decision says whether kernels compute, and a machine that cannot compile them says why."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch

from ullage_engine.kernels import triton
from ullage_engine.layers.attention import can_page
from ullage_engine.layers.moe import decodes
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig

GEOMETRY = ModelConfig(
    architecture="llama", layers=(LayerSpec(),), hidden=96, num_heads=6, num_kv_heads=2,
    head_dim=16, intermediate=64, vocab=50, max_position=512, rope_theta=1e4, rms_eps=1e-5,
    tied=True,
)  # fmt: skip


def test_nothing_is_in_the_way_here(device: torch.device) -> None:
    from ullage_engine.kernels.triton.launch import obstacle

    assert obstacle(device) is None


def test_a_cache_that_cannot_be_written(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ullage_engine.kernels.triton.launch import obstacle

    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    found = obstacle(device)
    assert found is not None
    assert found.endswith("; set TRITON_CACHE_DIR to a directory that can be written")
    assert str(tmp_path / "file") in found


def test_without_a_compiler_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ullage_engine.kernels.triton import launch

    attempts = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def no_headers(out: torch.Tensor) -> None:
        attempts.append(out)
        raise subprocess.CalledProcessError(1, ["gcc", "launcher.c"])

    monkeypatch.setattr(launch, "launch_count", no_headers)
    # Not a device of this process, so that no other test's decision is asked for.
    monkeypatch.setattr(launch.torch, "zeros", lambda *size, **options: torch.empty(16))
    gpu = torch.device("cuda", 77)
    with caplog.at_level(logging.WARNING):
        assert not triton.runs_on(gpu)
        assert not can_page(GEOMETRY, 16, gpu)
        assert decodes(gpu)
    assert len(attempts) == 1, "the decision is made once"
    [record] = caplog.records
    assert record.getMessage() == (
        "cuda:77 computes with torch's operations, which are slower: CalledProcessError: Command "
        "'['gcc', 'launcher.c']' returned non-zero exit status 1.; install gcc (or name another C "
        "compiler in CC) and Python's headers (python3-dev)"
    )


def test_a_cpu_is_never_asked() -> None:
    assert not triton.runs_on(torch.device("cpu"))
