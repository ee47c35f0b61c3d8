"""Many faults in a row on a cluster, with engines, a node and the operator as victims.

ULLAGE_E2E_FAULTS is their number, 6 unless set.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from ullage_cluster.kubectl import Kubectl, names
from ullage_cluster.release import Release
from ullage_cluster.service import Service

NUM_FAULTS = int(os.environ.get("ULLAGE_E2E_FAULTS", "6"))
TIMEOUT_S = 600 + 60 * NUM_FAULTS
GAP_S = 60
"""Longest accepted p95 of pauses: a drain of the only node evicts all engines at once."""


@pytest.mark.timeout(TIMEOUT_S)
def test_no_answer_is_lost_or_differs(
    kubectl: Kubectl,
    release: Release,
    service: Service,
    hold_nodes: Callable[[int], AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    victims = [*names(service.pods()), release.selector]
    pods = [f"--pod={victim}" for victim in victims]
    node = service.pods()[0]["spec"]["nodeName"]
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "ullage_cli.main", "verify", "inject", service.name]
    command += ["--namespace", kubectl.namespace, *pods, "--node", node]
    command += ["--faults", str(NUM_FAULTS), "--gap", str(GAP_S), "--json", str(report)]

    with hold_nodes(fcntl.LOCK_EX):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr

    criteria = {each["name"]: each for each in json.loads(report.read_text())["criteria"]}
    assert criteria["the server comes back from every fault"]["seen"] == str(NUM_FAULTS)
    assert criteria["lost answers"]["verdict"] == "passed"
    assert criteria["answers with other words"]["verdict"] == "passed"
    service.settle()
