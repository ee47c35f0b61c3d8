"""The proof of a start with vLLM: what is asked, what is compared, and what ends the start."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ullage_common.config.engine import (
    AdapterSection,
    EngineConfig,
    GroupSection,
    ModelSection,
)
from ullage_engine.model_loader.proof import confirm, tolerance
from ullage_engine.protocol.errors import ProofError
from ullage_engine.protocol.requests import TokenLogprobs
from ullage_engine.vllm_worker.arguments import Node, engine_args
from ullage_engine.vllm_worker.interface import CoreOutput
from ullage_engine.vllm_worker.proof import (
    Probe,
    changed_table,
    digest_model,
    proof_file,
    take_proofs,
)

PROBE = Probe(vocab_size=49_152, room_tokens=1024)
FLOAT32 = tolerance(torch.float32, is_exact=False)
WEIGHTS = "ab" * 32
CONFIG = EngineConfig(engine="vllm", model=ModelSection(source="file:///m", name="m"))
ADAPTERS = (AdapterSection(name="a", source="file:///a", rank=8),)
ARGUMENTS = engine_args(CONFIG, Path("/m"), "bfloat16", 0.5)


class FakeCore:
    """Computes the probe and digests of two ranks."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.weights = "a"
        self.suffix = ""
        """End of the names of weights."""
        self.table = ""
        self.numbers: Callable[[int], list[float]] = lambda _: [-9.0, -1.0, -2.0, -3.0]
        """Log-probabilities of a token in the run of that number."""

    def run_probe(self, probe: Probe) -> list[CoreOutput]:
        self.num_probes += 1
        chosen, *top = self.numbers(self.num_probes)
        return [
            CoreOutput(request.request_id, [7], logprobs=[TokenLogprobs(chosen, [1, 2, 3], top)])
            for request in probe.requests(self.num_probes)
            for _ in range(request.max_tokens)
        ]

    def digests(self) -> list[dict[str, str]]:
        return [{f"w{self.suffix}": self.weights, "cos_sin_cache": "t"}, {"w": "b"}]

    def changed_table(self) -> str:
        return self.table


def start(
    core: FakeCore, folder: Path, arguments: Mapping[str, Any] = ARGUMENTS, **facts: str
) -> None:
    """Prove a start, as a worker does."""
    file = proof_file(folder, WEIGHTS, {"vllm": "1", **facts}, PROBE, arguments)
    verified = file.read()
    outputs = core.run_probe(PROBE)
    found = take_proofs(core, PROBE, outputs, FLOAT32, verifies=verified is None)
    confirm(file, verified, found, FLOAT32)


@given(
    vocab_size=st.integers(2, 300_000),
    room_tokens=st.integers(2, 200),
    is_embedding=st.booleans(),
    may_draft=st.booleans(),
    run=st.integers(1, 3),
)
def test_the_probe_fits_whatever_a_model_serves(
    vocab_size: int,
    room_tokens: int,
    is_embedding: bool,
    may_draft: bool,
    run: int,
) -> None:
    probe = Probe(vocab_size, room_tokens, is_embedding, may_draft)
    requests = probe.requests(run)
    assert probe.requests(run) == requests
    for each in requests:
        named = list(each.sampling.logit_bias)
        assert all(0 <= token < vocab_size for token in each.token_ids + named)
        assert 1 <= each.num_prompt_tokens == len(each.token_ids)
        assert len(each.token_ids) + each.max_tokens <= room_tokens
        assert each.max_tokens == 0 if is_embedding else each.max_tokens >= 1
        assert each.sampling.top_logprobs == (None if is_embedding else min(20, vocab_size))
        assert each.cache_salt not in {other.cache_salt for other in probe.requests(run + 1)}


def test_the_usual_probe_is_a_prompt_beside_a_decode_of_named_tokens() -> None:
    first, second = PROBE.requests(1)
    assert (len(first.token_ids), len(second.token_ids)) == (32, 16)
    assert (first.max_tokens, second.max_tokens) == (3, 2)
    assert len(set(first.token_ids + second.token_ids)) == 48
    assert len(first.sampling.logit_bias) == len(second.sampling.logit_bias) == 1
    assert len(replace(PROBE, may_draft=True).requests(1)) == 1
    assert replace(PROBE, may_draft=True).requests(1)[0].sampling.logit_bias == {}


def test_the_first_start_computes_twice_and_later_ones_once(tmp_path: Path) -> None:
    core = FakeCore()
    start(core, tmp_path)
    assert core.num_probes == 2
    start(core, tmp_path)
    assert core.num_probes == 3
    [path] = tmp_path.iterdir()
    assert path.name.startswith("vllm-abab")
    assert path.suffix == ".proof"


def test_a_first_start_that_computes_two_things_is_not_kept(tmp_path: Path) -> None:
    core = FakeCore()
    core.numbers = lambda run: [-9.0, -1.0, -2.0, -3.0 - 0.1 * run]
    with pytest.raises(ProofError, match="than it did a moment before: logits of the probe"):
        start(core, tmp_path)

    core = FakeCore()
    core.table = "model.rotary_emb"
    with pytest.raises(ProofError, match=r"^model\.rotary_emb is computed otherwise a second"):
        start(core, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_later_start_may_differ_within_the_bound_alone(tmp_path: Path) -> None:
    core = FakeCore()
    start(core, tmp_path)
    # 8 is the spread of the numbers.
    core.numbers = lambda _: [-9.0, -1.0, -2.0, -3.0 - 8 * 0.0009]
    start(core, tmp_path)
    core.numbers = lambda _: [-9.0, -1.0, -2.0, -3.0 - 8 * 0.0011]
    with pytest.raises(ProofError, match=r"differ by 0\.0011 of their spread, and may by 0\.001;"):
        start(core, tmp_path)
    core.numbers = lambda _: [-9.0, -1.0, -2.0, float("nan")]
    with pytest.raises(ProofError, match="differ by inf"):
        start(core, tmp_path)
    # Other facts have a proof of their own.
    start(core, tmp_path, torch="2")
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_may_not_differ_at_all_and_the_rank_is_named(tmp_path: Path) -> None:
    core = FakeCore()
    start(core, tmp_path)
    core.weights = "c"
    with pytest.raises(ProofError, match=r"on rank 0: w has other bits in memory"):
        start(core, tmp_path)


def test_adapters_rename_tensors_and_have_a_proof_of_their_own(tmp_path: Path) -> None:
    plain = FakeCore()
    adapted = FakeCore()
    # vLLM wraps the modules of the base model.
    adapted.suffix = ".base_layer"
    config = structs.replace(CONFIG, adapters=ADAPTERS)
    with_adapters = engine_args(config, Path("/m"), "bfloat16", 0.5, adapter_slots=1)

    for _ in range(2):
        start(plain, tmp_path)
        start(adapted, tmp_path, with_adapters)
    assert (plain.num_probes, adapted.num_probes) == (3, 3)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_lora": True},
        {"max_lora_rank": 64},
        {"max_loras": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"nnodes": 2},
        {"quantization": "fp8"},
        {"load_format": "safetensors"},
        {"max_num_batched_tokens": 80},
        {"enable_chunked_prefill": False},
        {"enforce_eager": True},
        {"model_impl": "transformers"},
        {"hf_overrides": {"rope_theta": 1e4}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"an_argument_of_another_vllm": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_argument_that_may_change_the_model_has_a_proof_of_its_own(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    def path(arguments: Mapping[str, Any]) -> Path:
        return proof_file(tmp_path, WEIGHTS, {}, PROBE, arguments).path

    usual = path(ARGUMENTS)
    assert path(ARGUMENTS | changes) != usual
    assert path(dict(reversed(ARGUMENTS.items()))) == usual


def test_places_and_free_memory_share_a_proof(tmp_path: Path) -> None:
    moved = structs.replace(CONFIG, model=ModelSection(source="file:///n", name="n"))
    start(FakeCore(), tmp_path, engine_args(CONFIG, Path("/m"), "bfloat16", 0.5))
    start(FakeCore(), tmp_path, engine_args(moved, Path("/n"), "bfloat16", 0.4))
    nodes = structs.replace(CONFIG, gpus=2, group=GroupSection(nodes=2))
    for leader in ("10.0.0.1", "10.0.0.2"):
        arguments = engine_args(nodes, Path("/m"), "bfloat16", 0.5, Node(0, leader))
        start(FakeCore(), tmp_path, arguments)
    assert len(list(tmp_path.iterdir())) == 2


def test_embeddings_are_compared_as_logits_are(tmp_path: Path) -> None:
    probe = replace(PROBE, is_embedding=True)
    vector = np.linspace(-1.0, 1.0, 384, dtype="<f4")

    def proof(numbers: np.ndarray) -> list[list[float]]:
        outputs = [CoreOutput("probe-1-0", [], embedding=numbers.tobytes())]
        [first, _] = take_proofs(FakeCore(), probe, outputs, FLOAT32, verifies=False)
        return first.samples

    [row] = proof(vector)
    assert len(row) == 384
    assert proof(vector * 2) != [row]


class Rotary(torch.nn.Module):
    """Has its table as vLLM's modules do."""

    cos_sin_cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        places = torch.arange(64, dtype=torch.float32)
        parts = torch.arange(8, dtype=torch.float32)
        angles = places[:, None] * parts
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Scaled(Rotary):
    """Is computed from what only its start knows."""

    def _compute_cos_sin_cache(self, scale: float = 0.5) -> torch.Tensor:
        return super()._compute_cos_sin_cache() * scale


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = Rotary()
        self.norm = torch.nn.Linear(8, 8, bias=False)
        self.packed = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("workspace", torch.empty(4))


def test_tables_and_weights_are_digested_and_nothing_else() -> None:
    model = Model()
    whole = digest_model(model, with_weights=True)
    assert whole.keys() == {"rotary_emb.cos_sin_cache", "norm.weight"}
    assert digest_model(model, with_weights=False).keys() == {"rotary_emb.cos_sin_cache"}

    model.norm.weight.data.view(torch.int32)[3, 3] ^= 1
    model.rotary_emb.cos_sin_cache[40, 3] += 1.5e-4
    changed = digest_model(model, with_weights=True)
    assert [changed[name] == whole[name] for name in whole] == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_that_is_computed_otherwise_is_named(dtype: torch.dtype) -> None:
    model = Model()
    model.scaled = Scaled()
    model.rotary_emb.cos_sin_cache = model.rotary_emb.cos_sin_cache.to(dtype)
    assert changed_table(model, dtype) == ""
    assert torch.get_default_dtype() is torch.float32
    model.scaled.cos_sin_cache[40:] += 0.01
    assert changed_table(model, dtype) == ""
    model.rotary_emb.cos_sin_cache[40:] += 0.01
    assert changed_table(model, dtype) == "rotary_emb"
