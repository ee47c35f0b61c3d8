"""A worker that computes otherwise than a verified start does not serve."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ullage_testing.child_process import start_none

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.kernels import first_calls
from ullage_engine.layers import rotary_tables
from ullage_engine.layers.decoder import Decoder
from ullage_engine.layers.native_decoder import NativeDecoder
from ullage_engine.model_loader import loader
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.errors import ProofError
from ullage_engine.worker.startup import start

SIZES = {"vocab_size": 208, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}

needs_library = pytest.mark.skipif(
    instruction_set() is None, reason="the library cannot be used here; its log says why"
)
LIBRARY = pytest.param({"quantization": "int8", "dtype": "auto"}, marks=needs_library, id="library")
FP8 = pytest.param(
    {"quantization": "int8", "dtype": "auto", "kv_dtype": "fp8"}, marks=needs_library, id="fp8"
)
TORCH = pytest.param({"quantization": "none", "dtype": "float32"}, id="torch")
DETERMINISTIC = pytest.param(
    {"quantization": "none", "dtype": "float32", "deterministic": True}, id="deterministic"
)

StartWorker = Callable[[], None]

# A start of its own process that prints what it computes, with a weights folder that is given.
PRINTED = """
import sys
from pathlib import Path
from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.worker.startup import start
config = read_file(Path(sys.argv[1]), EngineConfig)
started = start(config, lambda loading: None, Path(sys.argv[1]).with_name("g"), None)
started.stop()
"""
BUSY = "while True: sum(range(100_000))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", 1, **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def write_config(model: Path, tmp_path: Path, weights: Path) -> Callable[..., Path]:
    def write(folder: Path = weights, **own: Any) -> Path:
        values = {
            "model": {"source": f"file://{model}", "name": "m", "max_model_len": 512} | own,
            "device": "cpu",
            "memory": {"device_bytes": 16 << 30, "max_kv": 1 << 20},
            "batching": {"max_sequences": 4, "prefill_chunk_tokens": 64},
            "server": {"weights_dir": str(folder), "threads": torch.get_num_threads()},
        }
        (tmp_path / "engine.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "engine.yaml"

    return write


@pytest.fixture
def start_worker(
    write_config: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> StartWorker:
    """Starts a worker in this process, of the model that is the test's parameter."""
    config = read_file(write_config(**request.param), EngineConfig)

    def begin() -> None:
        start(config, lambda loading: None, tmp_path / "g", start_none).stop()

    return begin


def proofs(weights: Path) -> list[bytes]:
    return [path.read_bytes() for path in weights.glob("*.proof")]


@pytest.mark.parametrize("start_worker", [LIBRARY, FP8, TORCH, DETERMINISTIC], indirect=True)
def test_every_start_computes_as_the_first_one(
    start_worker: StartWorker, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ullage.engine.weights")
    start_worker()
    assert "this start is verified" in caplog.messages
    [first] = proofs(weights)
    [rank] = json.loads(first.partition(b"\n")[2])["ranks"]
    assert {"cos", "sin", "norm"} <= rank["tensors"].keys()
    assert len(rank["samples"]) == 5
    caplog.clear()
    start_worker()
    assert "this start computes as a verified one does" in caplog.messages
    assert proofs(weights) == [first]


@pytest.mark.parametrize("start_worker", [LIBRARY, TORCH, DETERMINISTIC], indirect=True)
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_a_damaged_table_ends_the_start(
    start_worker: StartWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    exact = rotary_tables._rounded
    calls = []

    def damaged(numbers: Any) -> torch.Tensor:
        """Is wrong by 1.5e-4 in half of the rows, as torch was."""
        table = exact(numbers)
        calls.append(table)
        if (len(calls) % 2 == 1) == (name == "cos"):
            table[len(table) // 2 :] += 1.5e-4
        return table

    monkeypatch.setattr(rotary_tables, "_rounded", damaged)
    with pytest.raises(
        ProofError, match=rf"the verified start of .*\.proof: {name} has other bits"
    ):
        start_worker()
    monkeypatch.undo()
    start_worker()


@pytest.mark.parametrize("start_worker", [LIBRARY, TORCH], indirect=True)
def test_a_flipped_weight_ends_the_start(
    start_worker: StartWorker, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    [path] = weights.glob("*.weights")
    header = loader.read_header(path)
    assert header is not None
    exact = loader._map
    largest = max(header.tensors, key=lambda each: each.end - each.offset)
    for stored in (header.tensors[0], largest, header.tensors[-1]):
        place = (stored.offset + stored.end) // 2

        def flipped(path: Path, place: int = place) -> torch.Tensor:
            memory = exact(path).clone()
            memory[place] ^= 1
            return memory

        monkeypatch.setattr(loader, "_map", flipped)
        with pytest.raises(
            ProofError, match=r" has other bits in memory; if every start"
        ) as caught:
            start_worker()
        assert stored.name in str(caught.value) or " more has" in str(caught.value)
    monkeypatch.undo()
    start_worker()


@pytest.mark.parametrize("start_worker", [LIBRARY, DETERMINISTIC], indirect=True)
def test_a_kernel_that_rounds_otherwise_ends_the_start(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    run = NativeDecoder.run
    project = Decoder._project

    def native(self: NativeDecoder, chunks: Any, logits: torch.Tensor, *others: Any) -> list[int]:
        best = run(self, chunks, logits, *others)
        torch.nextafter(logits, torch.full_like(logits, torch.inf), out=logits)
        return best

    def torchs(self: Decoder, chosen: torch.Tensor, out: torch.Tensor) -> None:
        project(self, chosen, out)
        torch.nextafter(out, torch.full_like(out, torch.inf), out=out)

    monkeypatch.setattr(NativeDecoder, "run", native)
    monkeypatch.setattr(Decoder, "_project", torchs)
    with pytest.raises(ProofError, match=r"logits of the probe differ by .* of their spread"):
        start_worker()


@pytest.mark.parametrize("start_worker", [TORCH], indirect=True)
def test_sums_in_another_order_are_within_the_bound_and_wrong_ones_are_not(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    project = Decoder._project
    scale = 1.0

    def scaled(self: Decoder, chosen: torch.Tensor, out: torch.Tensor) -> None:
        project(self, chosen, out)
        out *= scale

    monkeypatch.setattr(Decoder, "_project", scaled)
    scale = 1.0 + 2.0**-20
    start_worker()
    scale = 1.01
    with pytest.raises(ProofError, match=r"and may by 0\.001;"):
        start_worker()


@pytest.mark.parametrize("start_worker", [LIBRARY], indirect=True)
def test_a_first_start_that_computes_two_answers_is_not_kept(
    start_worker: StartWorker, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = NativeDecoder.run
    calls = []

    def wavering(self: NativeDecoder, chunks: Any, logits: torch.Tensor, *others: Any) -> list[int]:
        best = run(self, chunks, logits, *others)
        calls.append(best)
        logits += 1e-6 * len(calls)
        return best

    monkeypatch.setattr(NativeDecoder, "run", wavering)
    with pytest.raises(ProofError, match="than it did a moment before: logits of the probe"):
        start_worker()
    assert proofs(weights) == []


@pytest.mark.parametrize("start_worker", [LIBRARY, TORCH], indirect=True)
def test_a_first_start_whose_table_is_damaged_is_not_kept(
    start_worker: StartWorker, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = rotary_tables._rounded
    calls = []

    def wrong_at_first(numbers: Any) -> torch.Tensor:
        table = exact(numbers)
        calls.append(table)
        if len(calls) == 1:
            table[len(table) // 2 :] += 1.5e-4
        return table

    monkeypatch.setattr(rotary_tables, "_rounded", wrong_at_first)
    with pytest.raises(ProofError, match=r"^cos is computed otherwise a second time"):
        start_worker()
    assert proofs(weights) == []


def flip_a_bit(path: Path) -> str:
    """Changes the largest tensor of a prepared file that has been compared with its checksums since
    the machine booted; returns the tensor's name."""
    header = loader.read_header(path)
    assert header is not None
    stored = max(header.tensors, key=lambda each: each.end - each.offset)
    with path.open("r+b") as file:
        file.seek((stored.offset + stored.end) // 2)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    path.with_suffix(".verified").write_text(loader._marker(path), encoding="ascii")
    return stored.name


@pytest.mark.parametrize("start_worker", [LIBRARY, TORCH], indirect=True)
def test_a_prepared_file_that_is_damaged_before_the_first_start_is_prepared_again(
    start_worker: StartWorker, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_worker()
    [first] = proofs(weights)
    [path] = weights.glob("*.weights")
    [proof] = weights.glob("*.proof")
    proof.unlink()
    name = flip_a_bit(path)

    with pytest.raises(ProofError, match=f"{path}: {name} in memory does not match its checksum"):
        start_worker()
    assert proofs(weights) == []
    start_worker()
    assert f"{path}: tensor {name} is damaged; preparing the weights again" in caplog.messages
    assert proofs(weights) == [first]


@pytest.mark.parametrize("start_worker", [LIBRARY, TORCH], indirect=True)
def test_weights_that_are_damaged_in_memory_at_the_first_start_are_not_kept(
    start_worker: StartWorker, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = loader._map

    def flipped(path: Path) -> torch.Tensor:
        memory = exact(path).clone()
        header = loader.read_header(path)
        assert header is not None
        memory[header.tensors[-1].offset] ^= 1
        return memory

    monkeypatch.setattr(loader, "_map", flipped)
    with pytest.raises(ProofError, match="in memory does not match its checksum"):
        start_worker()
    assert proofs(weights) == []
    monkeypatch.undo()
    start_worker()
    assert len(proofs(weights)) == 1


def test_another_setting_has_a_proof_of_its_own(
    write_config: Callable[..., Path], weights: Path, tmp_path: Path
) -> None:
    for max_model_len in (256, 512, 256):
        path = write_config(quantization="none", dtype="float32", max_model_len=max_model_len)
        config = read_file(path, EngineConfig)
        start(config, lambda loading: None, tmp_path / "g", start_none).stop()
    assert len(list(weights.glob("*.weights"))) == 1
    assert len(proofs(weights)) == 2


def test_vector_functions_are_first_called_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def function(numbers: torch.Tensor) -> None:
        threads.append(torch.get_num_threads())

    before = torch.get_num_threads()
    monkeypatch.setattr(first_calls, "_FUNCTIONS", (function,))
    torch.set_num_threads(2)
    try:
        first_calls.make_first_calls()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


def fingerprints(config: Path, weights: Path, num_starts: int) -> set[str]:
    """Starts workers one after the other, each as the first of its machine, beside two busy
    processes; returns the digests of what they compute."""
    found = set()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        for _ in range(num_starts):
            for path in weights.glob("*.proof"):
                path.unlink()
            command = [sys.executable, "-c", PRINTED, str(config)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            [stored] = proofs(weights)
            found.add(hashlib.sha256(stored).hexdigest())
    finally:
        for each in busy:
            each.kill()
            each.wait()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("own", [LIBRARY])
def test_starts_beside_busy_processes_compute_one_thing(
    own: dict[str, Any], write_config: Callable[..., Path], weights: Path
) -> None:
    assert len(fingerprints(write_config(**own), weights, 3)) == 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_starts_beside_busy_processes_compute_one_thing(
    write_config: Callable[..., Path], weights: Path
) -> None:
    num_starts = int(os.environ.get("ULLAGE_TEST_STARTS", "200"))
    config = write_config(quantization="int8", dtype="auto")
    assert len(fingerprints(config, weights, num_starts)) == 1
