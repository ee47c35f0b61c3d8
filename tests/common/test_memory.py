from pathlib import Path

import psutil
import pytest

from ullage_common.process.memory import container_limit, free_bytes, usable_bytes

MIB = 1 << 20


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_cgroup_is_a_limit(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{MIB}\n")
    assert container_limit(tmp_path) == usable_bytes(tmp_path) == MIB


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", None])
def test_without_a_limit_it_is_what_is_free(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "memory.max").write_text(text)
    free = psutil.virtual_memory().available
    assert container_limit(tmp_path) is None
    assert free // 2 < usable_bytes(tmp_path) < free * 2


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_container_holds_is_not_free(tmp_path: Path, version: int) -> None:
    """Cached files that the kernel drops when it needs room are free, others' bytes are not."""
    files = {"memory.max": 100 * MIB, "memory.current": 70 * MIB}
    cached = "inactive_file"
    if version == 1:
        (tmp_path / "memory").mkdir()
        files = {
            "memory/memory.limit_in_bytes": 100 * MIB,
            "memory/memory.usage_in_bytes": 70 * MIB,
        }
        cached = "total_inactive_file"
    for name, value in files.items():
        (tmp_path / name).write_text(f"{value}\n")
    stat = tmp_path / ("memory.stat" if version == 2 else "memory/memory.stat")
    stat.write_text(f"anon 5\n{cached} {20 * MIB}\n")
    assert free_bytes(tmp_path) == 50 * MIB
    stat.write_text(f"anon 5\n{cached} 0\n")
    assert free_bytes(tmp_path) == 30 * MIB


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
