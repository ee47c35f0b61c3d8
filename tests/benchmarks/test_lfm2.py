"""The benchmark of LFM2-8B-A1B, few samples of the small size: it computes what it says."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.families import decode_figures
from benchmarks.gpu.float32 import describe, forbid_tf32
from benchmarks.gpu.lfm2 import figures
from benchmarks.gpu.lfm2.__main__ import refusal
from benchmarks.gpu.lfm2.judge import PUBLISHED, Agreement, Measured, Work, failures, figures_of
from benchmarks.gpu.lfm2.measure import agreement

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu.lfm2", "--device", "cpu"]
CPU = torch.device("cpu")

JUDGED = Work(device="cuda", size="full")
AGREES = Agreement(top1=1024, rows=1024, largest=3e-6, median=1e-6)
PASSES = Measured(
    own=AGREES,
    plain=None,
    transformers=None,
    seconds=2.0,
    all_seconds=None,
    num_replaced=100,
    busiest_expert=1.5,
    idlest_expert=0.5,
    peak_bytes=45_000_000_000,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_every_figure_of_the_tiny_run_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """All positions, and transformers' own implementation on the same weights."""
    found = {each.name.partition(", 10 x 7, ")[2]: each for each in figures(CPU, tiny=True)}
    assert not [each for each in found.values() if not each.passes]
    equal = found["top-1 equal at all positions"]
    assert (equal.value, equal.unit, equal.aim) == (70, "of 70", 70)
    for name in (
        "greatest difference at all positions",
        "greatest difference from transformers, 8 samples",
    ):
        # Float32 is no more exact: that nothing differs would mean that nothing was compared.
        assert 0 < found[name].value < 1e-5, name
        assert found[name].aim is not None, name
    assert found["replaced as near ties"].aim == 0.15
    assert found["to last logits"].aim is None, "a rehearsal's speed is not judged"
    printed = capsys.readouterr().out
    assert "TF32 in cuBLAS: False, in cuDNN: False" in printed
    assert "reference: " in printed


def test_decode_steps_of_models_with_experts_are_recorded() -> None:
    found = list(decode_figures(CPU, tiny=True))
    assert [each.unit for each in found] == ["GB", "ms", "ms"] * 2
    assert all(each.value > 0 and each.aim is None for each in found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            replace(PASSES, seconds=1024 / PUBLISHED),
            "to last logits: 358.56 samples/s, not at least 358.56",
        ),
        (
            replace(PASSES, own=replace(AGREES, top1=1023)),
            "top-1 equal at last positions: 1023 of 1024, not at least 1024",
        ),
        (
            replace(PASSES, own=replace(AGREES, largest=1e-5)),
            "greatest difference at last positions: 1e-05 of the largest logit, not at most",
        ),
        (replace(PASSES, own=replace(AGREES, largest=math.nan)), "nan of the largest logit"),
        (replace(PASSES, num_replaced=200), "of 1224 samples, not at most"),
        (replace(PASSES, transformers=replace(AGREES, rows=256, largest=2e-5)), "8 samples"),
        (replace(PASSES, peak_bytes=60_000_000_000), "greatest memory: 60 GB, not at most 55"),
        (replace(PASSES, transformers_error="transformers: KeyError: 'w1'"), "KeyError"),
    ],
)
def test_each_bound_is_judged_by_itself(change: Measured, reason: str) -> None:
    assert failures(figures_of(JUDGED, PASSES), PASSES) == []
    (found,) = failures(figures_of(JUDGED, change), change)
    assert reason in found


@pytest.mark.parametrize(
    "work",
    [
        replace(JUDGED, samples=512),
        replace(JUDGED, tokens=16),
        replace(JUDGED, size="small"),
        replace(JUDGED, dtype="bfloat16"),
        replace(JUDGED, device="cpu"),
    ],
)
def test_other_work_is_not_judged_by_the_published_rate(work: Work) -> None:
    plain = AGREES if work.dtype == "bfloat16" else None
    slow = replace(PASSES, seconds=1e3, plain=plain, num_replaced=0)
    assert failures(figures_of(work, slow), slow) == []


def test_a_worse_type_may_be_as_wrong_as_a_plain_implementation() -> None:
    work = replace(JUDGED, dtype="bfloat16")
    worse = replace(PASSES, own=replace(AGREES, largest=0.1, median=1.3e-6), plain=AGREES)
    (found,) = failures(figures_of(work, worse), worse)
    assert "1.3 times that of a plain implementation" in found


def test_a_comparison_counts_every_slice() -> None:
    expected = torch.tensor([[1.0, 4.0], [2.0, 1.0], [3.0, 0.0]])
    actual = expected.clone()
    actual[2] = torch.tensor([0.0, 0.2])
    found = agreement([(actual[:2], expected[:2]), (actual[2:], expected[2:])])
    assert (found.top1, found.rows) == (2, 3)
    assert found.largest == pytest.approx(3 / 4)
    actual[0, 0] = math.nan
    assert math.isnan(agreement([(actual[:2], expected[:2])] * 2).largest)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Switch TF32 on for a test, and restore the setting afterwards."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32 = True
    cudnn.allow_tf32 = True
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
def test_tf32_is_off_whoever_switched_it_on() -> None:
    assert "cuBLAS: True, in cuDNN: True" in describe(CPU)
    forbid_tf32()
    assert "cuBLAS: False, in cuDNN: False, float32 products: highest" in describe(CPU)


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (Work("cpu", "small", tokens=1), "--tokens 1 is not a prompt; give 2 or more"),
        (
            Work("cpu", "small", micro_batches=0),
            "--micro-batches 0 is not positive; give 1 or more",
        ),
        (Work("cpu", "small", stages=25), "--stages 25 is more than the model's 24 layers"),
        (Work("cpu", "small", stages=2, all_positions=True), "give --stages 1"),
        (Work("cpu", "small", samples=4, against_transformers=5), "between 0 and the 4 samples"),
    ],
)
def test_a_bad_argument_is_named(work: Work, remedy: str) -> None:
    assert remedy in str(refusal(work))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_logits_are_the_reference_s(stages: int, dtype: str) -> None:
    # Micro-batches of 4, 3 and 3 samples where there are stages.
    sizes = ["--samples", "10", "--micro-batches", "3", "--tokens", "7", "--runs", "1"]
    done = run(*sizes, "--stages", str(stages), "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for rank in range(stages):  # The layers that the engine gives to each.
        assert f"rank {rank}  stage {rank}  tensor rank 0  cpu  layers {rank * 12}-" in done.stdout
    assert result["failed"] == []
    assert result["busiest_expert"] > 1.2
    if dtype == "float32":
        assert result["own"]["top1"] == 10
        assert result["own"]["largest"] < 1e-5
    else:
        assert 0 < result["own"]["median"] <= 1.25 * result["plain"]["median"]


@pytest.mark.slow
def test_too_few_samples_to_choose_from_is_an_error() -> None:
    done = run("--samples", "200", "--tokens", "32", "--spare", "0", "--runs", "1")
    assert done.returncode == 1
    assert "error: --spare 0.0: only" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_an_interrupt_ends_every_stage() -> None:
    """Like Ctrl-C, the signal reaches every process of the terminal."""
    with subprocess.Popen(
        [*COMMAND, "--stages", "2", "--runs", "1000", "--samples", "4", "--tokens", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        lines = []
        while "rank 1  stage" not in (line := process.stdout.readline()):
            lines.append(line)
            assert line, (lines, process.communicate())
        os.killpg(process.pid, signal.SIGINT)
        # Returns once every process has closed its end.
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
