from pathlib import Path

import pytest

from ullage_common.process.cpu_pressure import waiting_seconds

TEXT = """some avg10=1.66 avg60=4.66 avg300=11.50 total={}
full avg10=0.00 avg60=0.00 avg300=0.00 total=7
"""


def test_the_containers_waiting_goes_before_the_nodes(tmp_path: Path) -> None:
    node = tmp_path / "pressure" / "cpu"
    node.parent.mkdir()
    node.write_text(TEXT.format(9_000_000))
    assert waiting_seconds(tmp_path, tmp_path) == 9.0
    (tmp_path / "cpu.pressure").write_text(TEXT.format(1_250_000))
    assert waiting_seconds(tmp_path, tmp_path) == 1.25


@pytest.mark.parametrize("text", [None, "", "full avg10=0.00 total=7\n"])
def test_a_kernel_that_does_not_measure_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "cpu.pressure").write_text(text)
    assert waiting_seconds(tmp_path, tmp_path) is None
