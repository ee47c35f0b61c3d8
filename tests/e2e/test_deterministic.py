"""`deterministic`: a text is the same alone, in company, and across a kill.

In the numbers that the processor computes in: bfloat16, where products of other shapes round
otherwise, or float32; and in small numbers by the C++ library, with KV in float8.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ullage_testing.small_models import SOURCE, make_family

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.channels import open_channel
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.tokenizer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    Engine = Any

OUTPUT_TOKENS = {"llama": 10, "lfm2_moe": 100}
"""So many that the worker still computes some when it is killed after a few."""
STRUCK_AFTER = 5
PROMPTS = [
    [20 + (number * 7919 + index * 104_729) % 49_000 for index in range(length)]
    for number, length in enumerate([3, 17, 40, 64, 130, 250, 300, 12])
]
"""Tokens without sense: the model is unsure of what follows, so near-ties are frequent."""


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub,
    number: int,
    max_tokens: int,
    on_token: Callable[[int], None] = lambda count: None,
) -> tuple[list[int], int]:
    """(output tokens, times resumed); every second request is sampled, the others are greedy."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPTS[number]),
        sampling=inference_pb2.SamplingParams(
            temperature=1.0 if number % 2 else 0.0, top_p=0.95, seed=number
        ),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=inference_pb2.OutputOptions(return_token_ids=True),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request):
        if response.HasField("delta"):
            tokens += response.delta.token_ids
            on_token(len(tokens))
        elif response.HasField("finished"):
            return tokens, response.finished.resumes
    raise AssertionError("the stream ended without Finished")


@pytest.fixture
def experts(start_engine: Callable[..., "Engine"], tmp_path: Path) -> list["Engine"]:
    """An engine with random convolutions and experts, and SmolLM2's vocabulary."""
    sizes = {"vocab_size": 49_152, "hidden_size": 192, "max_position_embeddings": 1024}
    make_family("lfm2_moe", 20_261, **sizes).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(resolve_source(SOURCE).path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    small = {"quantization": "int8", "kv_dtype": "fp8", "dtype": "auto", "deterministic": True}
    engine = start_engine(
        model={"source": f"file://{tmp_path}", "name": "experts", **small},
        batching={"max_sequences": 20, "prefill_chunk_tokens": 48},
    )
    return [engine]


@pytest.mark.parametrize(("family", "engines"), [("llama", "pair"), ("lfm2_moe", "experts")])
def test_text_is_the_same_alone_in_company_and_across_a_kill(
    family: str, engines: str, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(engines)[0]
    num_tokens = OUTPUT_TOKENS[family]
    killed: list[int] = []

    def strike(count: int) -> None:
        if count >= STRUCK_AFTER and not killed:
            killed.append(engine.kill_worker())

    async def scenario() -> None:
        async with open_channel(engine.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            numbers = range(len(PROMPTS))
            alone = [(await generate(stub, number, num_tokens))[0] for number in numbers]
            assert all(len(tokens) == num_tokens for tokens in alone)
            together = await asyncio.gather(
                *(generate(stub, number, num_tokens) for number in numbers)
            )
            assert [tokens for tokens, _ in together] == alone
            struck = await asyncio.gather(
                *(generate(stub, number, num_tokens, strike) for number in numbers)
            )
            assert [tokens for tokens, _ in struck] == alone
            assert any(resumes == 1 for _, resumes in struck)

    asyncio.run(scenario())
    assert killed
    assert engine.worker_pid != killed[0]
