"""Embeddings: one vector a request, computed again where its worker dies, also without any KV."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import AdapterSection, EngineConfig, ModelSection
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_engine.server.app import AppError
from ullage_engine.server.restart_policy import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]
EAGER = RestartPolicy(first_backoff_s=0.05)
MAX_MODEL_LEN = 8192
ENCODER = {"task": "embed", "has_kv": False}


def ask(ids: Sequence[int] = (1, 2, 3), **fields: Any) -> pb.GenerateRequest:
    if "text" not in fields:
        fields["token_ids"] = pb.TokenIds(ids=ids)
    return pb.GenerateRequest(**({"embed": True} | fields))


async def embedding(engine: Any, request: pb.GenerateRequest) -> tuple[float, ...]:
    answer = await engine.generate(request)
    [delta] = answer.deltas
    assert not delta.text
    assert not delta.num_tokens
    assert answer.finished.reason == pb.FINISH_REASON_STOP
    assert answer.finished.usage.completion_tokens == 0
    vector = struct.unpack("<3f", delta.embedding)
    assert answer.finished.usage.prompt_tokens == answer.accepted.prompt_tokens == vector[0]
    return vector


async def refusal(engine: Any, request: pb.GenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.generate(request)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(("has_kv", "predicted"), [(True, 7 * 1600), (False, 0)])
def test_a_vector_is_priced_by_its_prompt(
    serve: Serve, fake: ModuleType, has_kv: bool, predicted: int
) -> None:
    async def scenario() -> None:
        async with serve(task="embed", has_kv=has_kv) as engine:
            ids = list(range(7 * 16))
            answer = await engine.generate(ask(ids))
            assert answer.accepted.predicted_bytes == predicted
            assert await embedding(engine, ask(ids)) == fake.vector_of(ids)
            described = await engine.inference.GetModel(pb.GetModelRequest())
            assert described.task == pb.TASK_EMBED
            assert len(described.profile.groups) == has_kv
            state = await engine.state()
            assert (state.kv_pool_bytes > 0, state.pressure_level) == (has_kv, 0)

    asyncio.run(scenario())


def test_a_vector_is_computed_again_where_its_worker_dies(
    serve: Serve,
    fake: ModuleType,
    config: EngineConfig,
    make_adapter: Callable[..., AdapterSection],
) -> None:
    adapters = (make_adapter("legal"),)

    async def scenario() -> None:
        async with serve(replace(config, adapters=adapters), EAGER, **ENCODER) as engine:
            ids = [fake.Script.LOST_TWICE, 2, 3]
            assert await embedding(engine, ask(ids, model="legal")) == fake.vector_of(ids, "legal")

    asyncio.run(scenario())


def test_the_whole_context_may_be_embedded(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**ENCODER) as engine:
            assert (await embedding(engine, ask([1] * MAX_MODEL_LEN)))[0] == MAX_MODEL_LEN
            error = await refusal(engine, ask([1] * (MAX_MODEL_LEN + 1)))
            assert error.reason == "CONTEXT_TOO_LONG"
            assert f"send at most {MAX_MODEL_LEN}" in error.message

    asyncio.run(scenario())


def test_a_model_is_for_one_task(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**ENCODER) as engine:
            error = await refusal(engine, ask(embed=False))
            assert (error.reason, error.metadata["field"]) == ("WRONG_TASK", "model")
            assert "/v1/embeddings" in error.message
        async with serve() as engine:
            error = await refusal(engine, ask())
            assert (error.reason, error.metadata["field"]) == ("WRONG_TASK", "model")
            assert "generates text" in error.message

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampling", pb.SamplingParams(seed=1)),
        ("stop", pb.StopConditions(max_tokens=1)),
        ("output", pb.OutputOptions(echo=True)),
        ("samples", pb.Samples(n=2)),
        ("grammar", pb.Grammar(regex="a")),
    ],
)
def test_what_means_nothing_for_a_vector_is_refused(serve: Serve, field: str, value: Any) -> None:
    async def scenario() -> None:
        async with serve(**ENCODER) as engine:
            error = await refusal(engine, ask(**{field: value}))
            assert error.metadata["field"] == field
            assert "nothing with embed" in error.message

    asyncio.run(scenario())


@pytest.fixture
def encoder(config: EngineConfig, tmp_path: Path) -> EngineConfig:
    """A configuration of an encoder, whose WordPiece tokens are not bytes."""
    words = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "one", "two")
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=3, pad_token="[PAD]")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    save_file({"norm": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    return replace(config, model=ModelSection(source=f"file://{tmp_path}", name="encoder"))


def test_text_gets_the_special_tokens_of_its_tokenizer(
    serve: Serve, fake: ModuleType, encoder: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(encoder, **ENCODER) as engine:
            whole = fake.vector_of([1, 4, 5, 4, 5, 2])
            assert await embedding(engine, ask(text="one two one two")) == whole

            for fields, ids in (
                ({"truncate_prompt_tokens": 4}, [1, 4, 5, 2]),
                ({"truncate_prompt_tokens": -1}, [1, 4, 5, 4, 5, 2]),
                ({"omit_special_tokens": True}, [4, 5, 4, 5]),
                ({"omit_special_tokens": True, "truncate_prompt_tokens": 3}, [4, 5, 4]),
            ):
                asked = ask(text="one two one two", **fields)
                assert await embedding(engine, asked) == fake.vector_of(ids), fields
            error = await refusal(engine, ask(text="one two", truncate_prompt_tokens=2))
            assert error.metadata["field"] == "truncate_prompt_tokens"

    asyncio.run(scenario())


def test_a_tokenizer_without_bytes_cannot_generate(serve: Serve, encoder: EngineConfig) -> None:
    async def scenario() -> None:
        async with serve(encoder, ready=False) as engine:
            with pytest.raises(AppError, match=r"WordPiece.* is not supported"):
                await asyncio.wait_for(asyncio.shield(engine.running), 60)
            engine.running = asyncio.create_task(asyncio.sleep(0))

    asyncio.run(scenario())
