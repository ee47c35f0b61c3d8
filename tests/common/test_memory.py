from pathlib import Path

import psutil
import pytest

from ullage_common.process.memory import container_limit, usable_bytes

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
