"""A start that fails on a rank that computes: rank 0 says why, wherever it waits by then."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import distributed
from ullage_testing.child_process import start_child

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.protocol.errors import RankFailedError, WorkerStartError
from ullage_engine.protocol.messages import Loading
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.started import Started
from ullage_engine.worker.startup import start

LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
# A real rank, one of whose functions does something else.
FOLLOWER = """
import sys
from ullage_engine.model_loader import loader
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.worker.rank import RankStartup
from ullage_engine.worker.rank_process import main
def other(*arguments):
    {body}
{function} = other
sys.exit(main())
"""

FAILED_BYTES = "raise WorkerStartError(str(arguments[0].ledger.total_bytes))"

StartGroup = Callable[[str, str], Started]


@pytest.fixture
def config(make_checkpoint: Callable[..., Path], tmp_path: Path) -> EngineConfig:
    folder = make_checkpoint(7, **LFM2)
    values: dict[str, Any] = {
        "model": {"source": f"file://{folder}", "name": "tiny", "max_model_len": 64},
        "device": "cpu",
        "gpus": 2,
        "parallelism": {"tensor": 2},
        "memory": {"threshold_percent": 100, "safety_reserve": 0, "max_kv": 64 << 20},
        "batching": {"max_sequences": 2, "prefill_chunk_tokens": 32},
        "server": {"weights_dir": str(tmp_path / "weights"), "threads": 1},
    }
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(values))
    return read_file(tmp_path / "engine.yaml", EngineConfig)


@pytest.fixture
def told() -> list[Loading]:
    """How far the ranks are."""
    return []


@pytest.fixture
def budgets() -> list[int]:
    """Bytes that ranks were given."""
    return []


@pytest.fixture
def start_group(
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[Loading],
    budgets: list[int],
) -> Iterator[StartGroup]:
    """Starts a group in whose other rank the given function has the given body."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def begin(function: str, body: str) -> Started:
        script = FOLLOWER.format(function=function, body=body)
        base = [sys.executable, "-c", script, "--config", str(tmp_path / "engine.yaml")]

        def start_rank(rank: int, endpoint: str, device_bytes: int | None) -> ForkedProcess:
            assert device_bytes is not None
            budgets.append(device_bytes)
            own = ["--rank", str(rank), "--endpoint", endpoint]
            return start_child([*base, *own, "--device-bytes", str(device_bytes)])

        return start(config, told.append, tmp_path / "g", start_rank)

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


# Before the ranks meet, before they compute, and while rank 0 waits for the other's part.
@pytest.mark.parametrize("method", ["ModelRunner.allocate_arena", "ModelRunner.warm_up"])
def test_what_one_rank_cannot_have_is_the_reason_of_all(
    start_group: StartGroup, method: str
) -> None:
    with pytest.raises(WorkerStartError, match=r"^rank 1: memory\.deviceBytes: set 2Gi or more$"):
        start_group(method, "raise WorkerStartError('memory.deviceBytes: set 2Gi or more')")


@pytest.mark.parametrize("method", ["RankStartup.load", "ModelRunner.run_largest"])
def test_what_nobody_foresaw_is_told_and_may_be_tried_again(
    start_group: StartGroup,
    told: list[Loading],
    capfd: pytest.CaptureFixture[str],
    method: str,
) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1: RuntimeError: no kernel image$") as caught:
        start_group(method, r"raise RuntimeError('no kernel image\nfor this device')")
    assert caught.value.may_retry
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    assert [line["rank"] for line in lines if line["message"] == "the rank cannot start"] == [1]
    stages = {each.stage for each in told if each.rank == 1}
    assert stages == (set() if method.endswith("load") else {"weights", "arena"})


def test_ranks_that_prepared_other_weights_start_again(start_group: StartGroup) -> None:
    with pytest.raises(RankFailedError, match="prepared the weights differently") as caught:
        start_group("loader.content_key", "return 'other'")
    assert caught.value.may_retry


def test_rank_0_decides_every_ranks_share(start_group: StartGroup, budgets: list[int]) -> None:
    with pytest.raises(WorkerStartError) as caught:
        start_group("RankStartup.load", FAILED_BYTES)
    # To the byte, which two ranks that look for themselves would never agree on.
    assert str(caught.value) == f"rank 1: {budgets[0]}"
