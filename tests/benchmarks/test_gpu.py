"""What runs on a GPU is tried here in tiny sizes, and says what failed."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu")
    sys.path[:] = before


def run(gpu: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    status: int = gpu.main()
    return status


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU `make gpu` runs the parts")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_every_part_runs(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(gpu, monkeypatch, "--dry-run", "kernels", "steps", "mixed", "tokens") == 0
    printed = capsys.readouterr().out
    expected = (
        "decode attention, 2 x 32", "prefill attention, 128", "mxfp4 product, 65 rows",
        "int4 experts, 1 tokens", "plain step, 3 x 40", "int8 step, 1 x 40",
        "memory after 20 mixed steps", "lfm2_moe",
    )  # fmt: skip
    assert not [each for each in expected if each not in printed], printed
    assert printed.count(": ok") == 4, printed
    assert "all passed" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(gpu, monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    is_for_cpus = torch.version.cuda is None
    cause = "torch here is without CUDA" if is_for_cpus else "there is no CUDA GPU"
    assert cause in printed.err and "--dry-run" in printed.err


def test_what_fails_is_named_and_the_rest_goes_on(
    gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Any]:
        yield gpu.Figure("slow", 0.4, "of copies", 0.5)
        yield gpu.Figure("grown", 3.0, "MiB", 0.0, True)
        yield gpu.Figure("unjudged", 0.0, "x")
        raise RuntimeError("out of resources\nand more")

    failed = gpu.measure("kernels", broken, judges=True)
    assert failed == ["kernels: slow", "kernels: grown", "kernels (RuntimeError: out of resources)"]
    assert capsys.readouterr().out.count("FAILED") == 3
    assert gpu.measure("kernels", broken, judges=False)[0].startswith("kernels (RuntimeError")


def test_other_tokens_and_failed_tests_do_not_pass(gpu: Any) -> None:
    from gpu_models import agreement

    assert agreement("llama", [[1, 2], [3]], [[1, 2], [3]]).passes
    assert not agreement("llama", [[1, 2], [3]], [[1, 2], [4]]).passes
    (figure,) = gpu.kernel_tests(("tests/benchmarks/no_such_test.py",))
    assert not figure.passes
