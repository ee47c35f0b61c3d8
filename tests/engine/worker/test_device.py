"""Which device a rank computes on."""

from pathlib import Path

import pytest
import torch

from ullage_common.config.engine import EngineConfig, ModelSection, ServerSection
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.worker.device import check_pinned, prepare_device


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


def test_more_pinned_memory_than_the_host_has_is_refused() -> None:
    check_pinned(100 << 20, 100 << 20, 4)
    told = "^memory.hostKV: 404 MiB of pinned host memory are more than the 400 MiB .* set less$"
    with pytest.raises(WorkerStartError, match=told):
        check_pinned(101 << 20, 100 << 20, 4)
