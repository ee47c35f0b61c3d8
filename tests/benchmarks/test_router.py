"""The benchmark of the router runs, and finds no error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_without_peers() -> None:
    command = [sys.executable, "-m", "benchmarks", "router", "--quick"]
    command += ["--engines", "1,5"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^(none|ullage) +\d.* (\d+)$", result.stdout, re.MULTILINE)
    assert rows == 2 * [("none", "0"), ("ullage", "0")]
    assert re.findall(r"^(\d+) engines: a decision takes \d+ us$", result.stdout, re.MULTILINE) == [
        "1",
        "5",
    ]
    assert "50 concurrent streams: 50 whole, 0 errors" in result.stdout
    assert "memory over 200 requests" in result.stdout
