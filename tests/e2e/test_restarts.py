"""Greedy texts are the same before and after every restart of a worker, in small numbers by the
library, as a service computes by default."""

import asyncio
import time
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

OWN = {"dtype": "auto", "quantization": "int8"}
STREAMS = 8
OUTPUT_TOKENS = 40
STRUCK_AFTER = 15
PROMPTS = [
    [20 + (number * 7919 + index * 104_729) % 49_000 for index in range(length)]
    for number, length in enumerate([3, 17, 40, 64, 130, 90, 200, 12])
]
"""Tokens without sense: the model is unsure of what follows, so near-ties are frequent."""


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub,
    prompt: list[int],
    salt: str,
    on_token: Callable[[int], None] = lambda count: None,
) -> tuple[list[int], int]:
    """(output tokens, times resumed) of one greedy request that finds no KV of others."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0),
        stop=inference_pb2.StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        output=inference_pb2.OutputOptions(return_token_ids=True),
        cache_salt=salt,
    )
    tokens: list[int] = []
    async for response in stub.Generate(request):
        if response.HasField("delta"):
            tokens += response.delta.token_ids
            on_token(len(tokens))
        elif response.HasField("finished"):
            return tokens, response.finished.resumes
    raise AssertionError("the stream ended without Finished")


async def strike_for(engine: "Engine", seconds: float) -> int:
    """Kills workers in the middle of eight streams, over and over; returns how many."""
    async with open_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        whole = [(await generate(stub, prompt, "alone"))[0] for prompt in PROMPTS]
        deadline = time.monotonic() + seconds
        kills = 0
        while kills < 2 or time.monotonic() < deadline:
            killed: list[int] = []

            def strike(count: int, killed: list[int] = killed) -> None:
                if count >= STRUCK_AFTER and not killed:
                    killed.append(engine.kill_worker())

            salt = f"round-{kills}"
            asked = (generate(stub, prompt, salt, strike) for prompt in PROMPTS)
            struck = await asyncio.gather(*asked)
            assert [tokens for tokens, _ in struck] == whole, f"after {kills + 1} kills"
            assert any(resumes == 1 for _, resumes in struck)
            kills += 1
    return kills


def test_two_kills_change_no_text(start_engine: Callable[..., "Engine"], tmp_path: Path) -> None:
    """With a small random model, which is loaded at once."""
    make_family("llama", 1, vocab_size=49_152, hidden_size=96, head_dim=32).save_pretrained(
        tmp_path
    )
    tokenizer = load_tokenizer(resolve_source(SOURCE).path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    engine = start_engine(
        model={"source": f"file://{tmp_path}", "name": "small", "max_model_len": 512, **OWN},
        batching={"max_sequences": STREAMS},
    )
    assert asyncio.run(strike_for(engine, 0.0)) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_kills_change_no_text(start_engine: Callable[..., "Engine"]) -> None:
    engine = start_engine(model=OWN, batching={"max_sequences": STREAMS})
    kills = asyncio.run(strike_for(engine, 120.0))
    print(f"{kills} kills")
    assert kills >= 3
