"""Which device a rank computes on."""

from pathlib import Path

import pytest
import torch

from ullage_common.config.engine import EngineConfig, ModelSection, ServerSection
from ullage_engine.worker.device import WorkerStartError, prepare_device


@pytest.mark.parametrize(
    ("built_for", "remedy"), [(None, "use one like engine-cuda"), ("12.8", "the node's driver")]
)
def test_an_engine_that_must_have_a_gpu_says_why_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_for: str | None, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    model, server = ModelSection(source="pkg://a/b", name="m"), ServerSection(run_dir=str(tmp_path))
    config = EngineConfig(model=model, device="cuda", server=server)
    with pytest.raises(WorkerStartError, match=f"^device: cuda .*{remedy}.*set device: cpu$"):
        prepare_device(config, 0)
