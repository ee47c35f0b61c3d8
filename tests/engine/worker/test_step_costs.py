"""A worker reuses the costs that the last worker of the same server measured, and no others."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage_engine.worker.step_costs import StepCosts, costs_key, leave_costs, read_costs

COSTS = StepCosts(decode_context_s=1e-6, prompt_token_s=2e-4, prompt_context_s=0.0)


def test_costs_are_found_under_their_key_alone(tmp_path: Path) -> None:
    key = costs_key("weights", os.getpid())
    assert read_costs(tmp_path, key) is None
    leave_costs(tmp_path, key, COSTS)
    assert read_costs(tmp_path, key) == COSTS
    assert read_costs(tmp_path, costs_key("other weights", os.getpid())) is None
    assert read_costs(tmp_path, costs_key("weights", os.getppid())) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-costs.json"]


def test_two_servers_with_one_process_id_have_different_keys() -> None:
    keys = set()
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        keys.add(costs_key("weights", process.pid).partition(" ")[2])
        process.communicate(b"\n")
    assert len(keys) == 2
    assert costs_key("weights", process.pid) == ""


def test_without_a_key_nothing_is_reused(tmp_path: Path) -> None:
    leave_costs(tmp_path, "", COSTS)
    assert read_costs(tmp_path, "") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": 1}', b'{"key": "a", "costs": {}}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-costs.json").write_bytes(content)
    assert read_costs(tmp_path, "a") is None


def test_costs_that_cannot_be_written_are_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        leave_costs(tmp_path / "absent", "a", COSTS)
    assert "cannot be kept" in caplog.text
