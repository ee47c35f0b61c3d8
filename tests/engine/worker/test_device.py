"""Which device a rank computes on."""

from pathlib import Path

import pytest
import torch

from ullage_common.config.engine import (
    EngineConfig,
    HostTierSection,
    MemorySection,
    ModelSection,
    ServerSection,
    TiersSection,
)
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.worker import device
from ullage_engine.worker.device import check_pinned, open_ledger, prepare_device


@pytest.mark.parametrize(
    ("built_for", "remedy"), [(None, "use one like engine-cuda"), ("12.8", "the node's driver")]
)
def test_an_engine_that_must_have_a_gpu_says_why_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_for: str | None, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    model = ModelSection(source="pkg://a/b", name="m")
    server = ServerSection(run_dir=str(tmp_path))
    config = EngineConfig(model=model, device="cuda", server=server)
    with pytest.raises(WorkerStartError, match=f"^device: cuda .*{remedy}.*set device: cpu$"):
        prepare_device(config, 0)


@pytest.mark.parametrize(
    "tiers", [TiersSection(), TiersSection(host=HostTierSection(size=8 << 20))]
)
def test_only_a_host_tier_that_was_asked_for_makes_a_cpus_budget_smaller(
    monkeypatch: pytest.MonkeyPatch, tiers: TiersSection
) -> None:
    monkeypatch.setattr(device, "container_limit", lambda: 64 << 20)
    monkeypatch.setattr(device, "usable_bytes", lambda: 64 << 20)

    def total(device_bytes: int | None) -> int:
        config = EngineConfig(
            model=ModelSection(source="pkg://a/b", name="m"),
            memory=MemorySection(device_bytes=device_bytes, tiers=tiers),
        )
        return open_ledger(config, torch.device("cpu"), 8 << 20).total_bytes

    is_asked = tiers.host.size is not None
    assert total(None) == (56 if is_asked else 64) << 20
    assert total(56 << 20) == 56 << 20
    if not is_asked:
        assert total(64 << 20) == 64 << 20
        return
    words = "64 MiB beside the 8 MiB of memory.tiers.host.size is more than the container's limit"
    with pytest.raises(WorkerStartError, match=words):
        total(64 << 20)


def test_more_pinned_memory_than_the_host_has_is_refused() -> None:
    check_pinned(100 << 20, 100 << 20, 4)
    told = "^memory.hostKV: 404 MiB of pinned host memory are more than the 400 MiB .* set less$"
    with pytest.raises(WorkerStartError, match=told):
        check_pinned(101 << 20, 100 << 20, 4)
