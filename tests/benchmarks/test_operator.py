"""The benchmark of many services runs, and measures what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_few_services_are_measured():
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    command = [sys.executable, "-m", "benchmarks", "operator", "--services=2", "--seconds=1"]
    command += ["--edits=2"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^ *([^0-9]+?)  +([0-9.]+)", done.stdout, re.M))
    assert float(found["objects watched"]) >= 2 * 12
    assert float(found["memory"]) > 10
    assert float(found["reconciled from nothing"]) > 0
    assert float(found["reconciled after restart"]) > 0
    assert float(found["statuses written by it"]) == 0
    assert 0 < float(found["edit to applied, median"]) <= float(found["edit to applied, most"])
