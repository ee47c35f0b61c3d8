"""What cannot work is refused before anything is loaded."""

from pathlib import Path

import pytest

from ullage_engine.config import EngineConfig, ModelSection
from ullage_engine.core.device import StartError
from ullage_engine.core.rank_startup import RankStartup


def test_keys_and_values_of_fp8_are_refused(tmp_path: Path) -> None:
    model = ModelSection(source=f"file://{tmp_path}", name="m", kv_dtype="fp8")
    with pytest.raises(StartError, match=r"spec\.model\.kvDtype: fp8 is not supported"):
        RankStartup(EngineConfig(model=model), 0, lambda loading: None)
