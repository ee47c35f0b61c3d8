"""An engine's fingerprint changes with each thing that decides its bits, and with nothing else."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_common.config.engine import (
    BatchingSection,
    EngineConfig,
    MemorySection,
    ModelSection,
    ParallelismSection,
    ServerSection,
    VllmSection,
)
from ullage_common.wire.fingerprint import Fingerprint, differences, fingerprint_of
from ullage_engine.model_loader.digest import model_digest
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.native import library
from ullage_engine.vllm_worker.fingerprint import Backend, engine_facts
from ullage_engine.worker import fingerprint as own
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.fingerprint import build_digest, cpu_kind
from ullage_engine.worker.rank import RankStartup

SIZES = {"vocab_size": 208, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}

needs_library = pytest.mark.skipif(library.instruction_set() is None, reason="needs the library")


@pytest.fixture(scope="module")
def source(
    tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Any]
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("source") / "model"
    random_model("llama", 1, **SIZES).save_pretrained(folder)
    return folder


def loaded(source: Path, weights_dir: Path, **fields: Any) -> RankStartup:
    model = {"dtype": "float32", "quantization": "int8", "max_model_len": 256}
    sections = {
        name: fields.pop(name) for name in ("batching", "memory", "device") if name in fields
    }
    config = EngineConfig(
        model=ModelSection(source=f"file://{source}", name="m", **{**model, **fields}),
        **{"device": "cpu", "batching": BatchingSection(max_sequences=4), **sections},
        server=ServerSection(weights_dir=str(weights_dir), threads=torch.get_num_threads()),
    )
    rank = RankStartup(config, 0, lambda _: None, HostTier("", 64 << 20))
    rank.load()
    return rank


def facts_that_differ(one: Fingerprint, other: Fingerprint) -> set[str]:
    return set(differences({"one": one, "other": other}))


def test_a_copy_with_other_times_elsewhere_computes_alike(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    one = loaded(source, tmp_path / "w1")
    other = loaded(copy, tmp_path / "w2")
    assert one.weights_key != other.weights_key
    assert one.fingerprint == other.fingerprint
    assert one.kv_space == other.kv_space != b""


def test_what_decides_no_bit_changes_nothing(source: Path, tmp_path: Path) -> None:
    usual = loaded(source, tmp_path)
    for fields in (
        {"batching": BatchingSection(max_sequences=9, prefill_chunk_tokens=32)},
        {"memory": MemorySection(max_kv=8 << 20)},
        {"max_model_len": 128},
    ):
        assert loaded(source, tmp_path, **fields).fingerprint == usual.fingerprint


@needs_library
def test_each_field_that_decides_bits_is_a_difference(source: Path, tmp_path: Path) -> None:
    usual = loaded(source, tmp_path)
    for fields, expected in (
        ({"kv_dtype": "fp8"}, {"kv_dtype"}),
        ({"deterministic": True}, {"deterministic"}),
        (
            {"quantization": "none"},
            {"quantization", "weights", "computed_by", "torch", "processor", "threads"},
        ),
        ({"quantization": "int4"}, {"quantization", "weights"}),
    ):
        rank = loaded(source, tmp_path, **fields)
        assert facts_that_differ(usual.fingerprint, rank.fingerprint) == expected, fields
        assert rank.kv_space != usual.kv_space


def test_one_changed_weight_is_another_model(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    one = loaded(source, tmp_path / "w")
    other = loaded(copy, tmp_path / "w")
    assert facts_that_differ(one.fingerprint, other.fingerprint) == {"weights"}


def test_one_changed_constant_is_another_configuration(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    config = copy / "config.json"
    text = config.read_text()
    assert '"rms_norm_eps": 1e-06' in text
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    one = loaded(source, tmp_path / "w")
    other = loaded(copy, tmp_path / "w")
    assert facts_that_differ(one.fingerprint, other.fingerprint) == {"model_config"}


@needs_library
def test_another_instruction_set_has_the_same_order(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loaded(source, tmp_path).fingerprint
    other_set = {"avx2": "avx512", "avx512": "avx2"}[own.library.instruction_set() or "avx2"]
    monkeypatch.setattr(own.library, "instruction_set", lambda: other_set)
    assert facts_that_differ(before, loaded(source, tmp_path).fingerprint) == set()
    monkeypatch.setattr(own, "_ORDER", "32 sums, 1")
    assert facts_that_differ(before, loaded(source, tmp_path).fingerprint) == {"order"}


@needs_library
def test_another_build_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loaded(source, tmp_path).fingerprint
    other = tmp_path / "libullage.so"
    other.write_bytes(library.PATH.read_bytes() + b"\0")
    monkeypatch.setattr(own, "_library_bytes", other.read_bytes)
    build_digest.cache_clear()
    try:
        assert facts_that_differ(before, loaded(source, tmp_path).fingerprint) == {"build"}
    finally:
        build_digest.cache_clear()


def test_where_torch_computes_its_version_processor_and_threads_count(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"quantization": "none"}
    before = loaded(source, tmp_path, **plain).fingerprint
    assert before.facts["computed_by"] == "torch"
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert facts_that_differ(before, loaded(source, tmp_path, **plain).fingerprint) == {"torch"}
    monkeypatch.undo()
    monkeypatch.setattr("ullage_engine.worker.rank.processor_of", lambda _: "another")
    found = loaded(source, tmp_path, **plain).fingerprint
    assert facts_that_differ(before, found) == {"processor"}


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Xeon
flags\t\t: fpu avx2 fma avx512f amx_bf16

processor\t: 1
vendor_id\t: other
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd asimddp bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_processors_are_named_by_vendor_model_and_extensions(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    capability = torch.backends.cpu.get_cpu_capability()
    for text, names, flags in (
        (INTEL, "GenuineIntel 6 143", "amx_bf16 avx2 avx512f fma"),
        (ARM, "0x41 0xd40", "asimd asimddp bf16"),
    ):
        path.write_text(text)
        assert cpu_kind(path) == f"{names} {capability} {flags}"
        path.write_text(text.replace("bf16", ""))
        assert "bf16" not in cpu_kind(path)
    assert cpu_kind(tmp_path / "absent") == capability


BACKEND = Backend(version="1.0", device="cpu", processor="p", dtype="bfloat16")


def vllm_config(source: Path, **sections: Any) -> EngineConfig:
    values = {"model": ModelSection(source=f"file://{source}", name="m"), **sections}
    return EngineConfig(engine="vllm", device="cpu", **values)


def vllm_fingerprint(config: EngineConfig, kept: Path, backend: Backend = BACKEND) -> Fingerprint:
    files = resolve_source(config.model.source)
    return fingerprint_of(engine_facts(config, files, model_digest(files, kept), backend))


def test_with_vllm_two_copies_compute_alike_and_each_change_is_told(
    source: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    usual = vllm_fingerprint(vllm_config(source), tmp_path / "kept")
    assert vllm_fingerprint(vllm_config(copy), tmp_path / "other") == usual

    def changed(backend: Backend = BACKEND, **sections: Any) -> set[str]:
        config = vllm_config(source, **sections)
        return facts_that_differ(usual, vllm_fingerprint(config, tmp_path / "kept", backend))

    model = {"source": f"file://{source}", "name": "m"}
    assert changed(vllm=VllmSection(args={"enforce_eager": True})) == {"args"}
    assert changed(model=ModelSection(**model, max_model_len=64)) == {"max_model_len"}
    assert changed(model=ModelSection(**model, kv_dtype="fp8")) == {"kv_dtype"}
    assert changed(gpus=2, parallelism=ParallelismSection(tensor=2)) == {"ranks"}
    for name, value in (("version", "1.1"), ("processor", "q"), ("dtype", "float32")):
        fields = {"version": "1.0", "device": "cpu", "processor": "p", "dtype": "bfloat16"}
        fact = "vllm" if name == "version" else name
        assert changed(Backend(**{**fields, name: value})) == {fact}
    environment = {"VLLM_BATCH_INVARIANT": "1"}
    assert changed(replace(BACKEND, environment=environment)) == {"environment"}
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    found = vllm_fingerprint(vllm_config(copy), tmp_path / "kept")
    assert facts_that_differ(usual, found) == {"model_config"}
