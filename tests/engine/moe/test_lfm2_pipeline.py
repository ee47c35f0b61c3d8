"""The benchmark of LFM2-8B-A1B, few samples of the small size: it computes what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "lfm2_pipeline.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_logits_are_the_reference_s(stages: int) -> None:
    # Micro-batches of 4, 4 and 2.
    sizes = ["--samples", "10", "--micro-batches", "3", "--tokens", "7", "--runs", "1"]
    done = run(*sizes, "--stages", str(stages))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["top1_agreed"] == 10
    assert result["max_relative_difference"] < 1e-5
    assert result["busiest_expert_times_mean"] > 1.2


def test_a_bad_argument_is_named() -> None:
    done = run("--tokens", "1")
    assert done.returncode == 2
    assert "--tokens 1 is not a prompt; give 2 or more" in done.stderr
