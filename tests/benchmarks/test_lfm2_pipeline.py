"""The benchmark of LFM2-8B-A1B, few samples of the small size: it computes what it says."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "lfm2_pipeline.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize(("stages", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_logits_are_the_reference_s(stages: int, dtype: str) -> None:
    # Micro-batches of 4, 3 and 3 samples where there are stages.
    sizes = ["--samples", "10", "--micro-batches", "3", "--tokens", "7", "--runs", "1"]
    done = run(*sizes, "--stages", str(stages), "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for rank in range(stages):  # The layers that the engine gives to each.
        assert f"rank {rank}  stage {rank}  tensor rank 0  cpu  layers {rank * 12}-" in done.stdout
    assert result["busiest_expert_times_mean"] > 1.2
    if dtype == "float32":
        assert result["engine"]["top1"] == 10
        assert result["engine"]["largest"] < 1e-5
    else:
        assert 0 < result["engine"]["median"] <= 1.25 * result["plain"]["median"]


def test_an_interrupt_ends_every_stage() -> None:
    """As Ctrl-C does it, which every process of the terminal gets."""
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--stages", "2", "--runs", "1000"]
    with subprocess.Popen(
        [*command, "--samples", "4", "--tokens", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        lines = []
        while "rank 1" not in (line := process.stdout.readline()):
            lines.append(line)
            assert line, (lines, process.communicate())
        os.killpg(process.pid, signal.SIGINT)
        # Returns once every process has closed its end.
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_a_bad_argument_is_named() -> None:
    done = run("--tokens", "1")
    assert done.returncode == 2
    assert "--tokens 1 is not a prompt; give 2 or more" in done.stderr
