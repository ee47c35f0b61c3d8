"""Kernels are compiled ahead for what the product launches, without a list of them."""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu import compile as ahead

from ullage_engine.kernels import triton as kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "small lfm2_moe",
            {"attend_split", "merge_splits", "attend_tile", "convolve_row", "multiply_expert"},
        ),
        ("small gpt_oss, packed", {"attend_split", "attend_tile", "multiply_expert"}),
    ],
)
def test_steps_of_a_model_reach_its_kernels(
    case: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ullage_engine.kernels.triton.launch import count

    launched: set[str] = set()

    def record(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: launched.add(kernel.__name__)

    monkeypatch.setattr(type(count), "__getitem__", record)
    monkeypatch.setattr(kernels, "runs_on", lambda device: True)
    ahead.run_steps(ahead.CASES[case]())
    assert launched >= expected


class FakeKernel:
    """A kernel whose compiler prints what the assembler would, or fails."""

    __name__ = "attend_split"

    def __init__(self, log: str = "", error: str = "") -> None:
        self._log = log
        self._error = error

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> Any:
        if self._error:
            raise RuntimeError(self._error)
        print(self._log)
        metadata = SimpleNamespace(name="attend_split", shared=1024)
        return SimpleNamespace(hash=repr(args), metadata=metadata, asm={"ptx": "mma.sync"})


def test_what_is_compiled_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = ahead.Recorder("llama", 90)
    kernel = FakeKernel(
        "ptxas info: 4 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads"
    )
    for argument in (1, 1, 2):
        recorder.launch(kernel, (1,))(argument, BLOCK=16)
    one, other = recorder.compiled
    assert one.spilled == 8
    assert one.shared == 1024
    assert one.uses_tensor_cores
    assert not one.fault
    assert other.name == one.name
    assert not capsys.readouterr().out, "what the assembler prints is not the programme's output"

    cached = ahead.Recorder("llama", 90)
    cached.launch(FakeKernel(), (1,))()
    assert cached.compiled[0].spilled is None
    assert "cached" in ahead.line(cached.compiled[0])


def test_what_a_gpu_cannot_run_is_a_fault() -> None:
    recorder = ahead.Recorder("llama", 90)
    for _ in "ab":
        recorder.launch(FakeKernel(error="out of registers\nand more"), (1,))(BLOCK=16)
    (failed,) = recorder.compiled
    assert failed.fault == "RuntimeError: out of registers"

    fits = ahead.Compiled("llama", "attend_tile", 90, 1.0, shared=ahead.SHARED_BYTES[90])
    assert not fits.fault
    larger = ahead.Compiled("llama", "attend_tile", 90, 1.0, shared=ahead.SHARED_BYTES[90] + 1)
    assert "shared memory" in larger.fault


@pytest.mark.parametrize("arguments", [["--arch", "volta"], ["--processes", "0"], ["no-such-case"]])
def test_wrong_arguments_name_the_remedy(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        ahead.main(arguments)
    printed = capsys.readouterr().err
    assert any(word in printed for word in ("give", "choose from")), printed
