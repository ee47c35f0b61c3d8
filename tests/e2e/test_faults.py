"""The fault benchmark, short: every kind of fault under eight streams, no error, the same text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESTART_S = 30.0


@pytest.mark.slow
def test_ten_faults_in_a_row_change_nothing_that_clients_see(weights_dir: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "faults", "--faults", "10", "--prompts", "6"]
    command += ["--tokens", "48", "--weights-dir", str(weights_dir)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[0])
    assert result["errors"] == []
    assert result["faults"] == 10
    assert result["answers"] >= 8
    assert result["resumes"] >= 8
    counts = {kind: row["count"] for kind, row in result["recovery_s"].items()}
    assert sum(counts.values()) == 10
    assert counts["oom"] == 6
    assert counts["stop"] >= 1
    assert counts["kill"] >= 1
    assert all(row["max"] < RESTART_S for row in result["recovery_s"].values())
