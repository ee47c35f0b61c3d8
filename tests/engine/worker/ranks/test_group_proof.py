"""Each rank of a group proves its part, and the last stage the logits."""

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
from ullage_engine.model_loader import loader
from ullage_engine.protocol.errors import ProofError, RankFailedError
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.startup import start

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
# A real rank, whose tables are wrong from a place on.
RANK = """
import sys
from ullage_engine.layers import rotary_tables
from ullage_engine.worker.rank_process import main
exact = rotary_tables._rounded
def rounded(numbers):
    table = exact(numbers)
    table[len(table) // 2 :] += {error}
    return table
rotary_tables._rounded = rounded
sys.exit(main())
"""

StartGroup = Callable[..., None]


@pytest.fixture
def start_group(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartGroup]:
    """Starts a group of two ranks whose second one has an error in its tables."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = make_checkpoint(7, **LLAMA)

    def begin(error: float, **layout: int) -> None:
        values: dict[str, Any] = {
            "model": {"source": f"file://{model}", "name": "tiny", "max_model_len": 64},
            "device": "cpu",
            "gpus": 2,
            "parallelism": layout,
            "memory": {"threshold_percent": 100, "safety_reserve": 0, "max_kv": 64 << 20},
            "batching": {"max_sequences": 2, "prefill_chunk_tokens": 32},
            "server": {"weights_dir": str(tmp_path / "weights"), "threads": 1},
        }
        (tmp_path / "engine.yaml").write_text(yaml.safe_dump(values))
        base = [sys.executable, "-c", RANK.format(error=error)]
        base += ["--config", str(tmp_path / "engine.yaml")]

        def start_rank(rank: int, endpoint: str, device_bytes: int | None) -> ForkedProcess:
            own = ["--rank", str(rank), "--endpoint", endpoint]
            return start_child([*base, *own, "--device-bytes", str(device_bytes)])

        config = read_file(tmp_path / "engine.yaml", EngineConfig)
        try:
            start(config, lambda loading: None, tmp_path / "g", start_rank).stop()
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    return begin


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}])
def test_a_rank_whose_table_is_damaged_ends_the_start_of_all(
    start_group: StartGroup, tmp_path: Path, layout: dict[str, int]
) -> None:
    start_group(0.0, **layout)
    [path] = (tmp_path / "weights").glob("*.proof")
    first = path.read_bytes()
    num_logits = [len(rank["samples"]) for rank in json.loads(first.partition(b"\n")[2])["ranks"]]
    sampling = 0 if "tensor" in layout else 1
    assert num_logits == [5 if rank == sampling else 0 for rank in range(2)]
    start_group(0.0, **layout)
    with pytest.raises(ProofError, match=r"\.proof on rank 1: cos and 1 more has other bits"):
        start_group(1.5e-4, **layout)
    assert path.read_bytes() == first


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}])
def test_a_file_that_is_damaged_before_the_first_start_of_a_group_is_prepared_again(
    start_group: StartGroup, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Each tensor of the file is compared by one of the ranks."""
    start_group(0.0, **layout)
    weights = tmp_path / "weights"
    [path] = weights.glob("*.weights")
    header = loader.read_header(path)
    assert header is not None

    for stored in header.tensors[-2:]:
        [proof] = weights.glob("*.proof")
        first = proof.read_bytes()
        proof.unlink()
        with path.open("r+b") as file:
            file.seek(stored.offset)
            [byte] = file.read(1)
            file.seek(stored.offset)
            file.write(bytes([byte ^ 1]))
        path.with_suffix(".verified").write_text(loader._marker(path), encoding="ascii")

        with pytest.raises(
            (ProofError, RankFailedError),
            match=f"{stored.name} in memory does not match its checksum",
        ):
            start_group(0.0, **layout)
        assert not list(weights.glob("*.proof"))
        start_group(0.0, **layout)
        assert proof.read_bytes() == first
