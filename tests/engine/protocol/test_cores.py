import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage_common.process.config_file import ConfigError
from ullage_common.process.cores import physical_cores, pin, usable_cores
from ullage_engine.server.worker_env import worker_env

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


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_a_physical_core_are_one_group(tmp_path: Path, name: str) -> None:
    """On two sockets with two dies each, whose cores have the same number; what the kernel does not
    describe stands alone."""
    for core, (package, threads) in enumerate([(0, "0,4"), (1, "1,5"), (0, "2,6"), (1, "3,7")] * 2):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text("0\n")
        (topology / name).write_text(f"{threads}\n")
    groups = [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert physical_cores([*range(10)], tmp_path) == [*groups, [8], [9]]
    assert physical_cores([4, 5, 6], tmp_path) == [[4], [6], [5]]


def test_without_a_cgroup_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALL


def test_an_engine_that_shares_its_cores_lets_its_threads_sleep() -> None:
    assert worker_env(2)["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in worker_env(2, owns_cores=True)
    assert worker_env(2, num_ranks=2, owns_cores=True)["GOMP_SPINCOUNT"] == "1000"


def test_a_process_with_some_of_the_cores_is_pinned() -> None:
    program = "from ullage_common.process.cores import is_pinned; print(is_pinned())"
    first = min(os.sched_getaffinity(0))
    # Of a machine with one core all of them are one.
    wanted = (os.cpu_count() or 1) > 1
    output = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{first}}}); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == str(wanted)


def test_an_engine_cannot_have_cores_that_its_process_may_not_use() -> None:
    allowed = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"server\.cores: 4095 is not among .*; name some"):
        pin([min(allowed), 4095])
    assert os.sched_getaffinity(0) == allowed


def test_worker_and_server_of_an_engine_run_on_its_cores() -> None:
    program = (
        "import os, subprocess, sys; from ullage_common.process.cores import pin; "
        "pin([int(sys.argv[1])]); "
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])"
    )
    first = min(os.sched_getaffinity(0))
    output = subprocess.run(
        [sys.executable, "-c", program, str(first)], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == f"{{{first}}}"
