import os
from pathlib import Path

import pytest

from ullage_engine.protocol.messages import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", ALL), ("150000 100000\n", min(ALL, 2)), ("10000 100000\n", 1), ("\n", ALL)],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", ALL), ("50000\n", 1)])
def test_the_first_version_has_a_file_each(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_cgroup_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALL
