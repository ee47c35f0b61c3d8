"""`deterministic`: a text is the same alone, in company, and across a kill.

In the numbers that the processor computes in: bfloat16, where products of other shapes round
otherwise, or float32.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.channels import open_channel

if TYPE_CHECKING:
    Engine = Any

OUTPUT_TOKENS = 10
PROMPTS = [
    [20 + (number * 7919 + index * 104_729) % 49_000 for index in range(length)]
    for number, length in enumerate([3, 17, 40, 64, 130, 250, 300, 12])
]
"""Tokens without sense: the model is unsure of what follows, so near-ties are frequent."""


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub,
    number: int,
    on_token: Callable[[int], None] = lambda count: None,
) -> tuple[list[int], int]:
    """(output tokens, times resumed); every second request is sampled, the others are greedy."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPTS[number]),
        sampling=inference_pb2.SamplingParams(
            temperature=1.0 if number % 2 else 0.0, top_p=0.95, seed=number
        ),
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


def test_text_is_the_same_alone_in_company_and_across_a_kill(pair: list["Engine"]) -> None:
    engine = pair[0]
    killed: list[int] = []

    def strike(count: int) -> None:
        if count >= OUTPUT_TOKENS // 2 and not killed:
            killed.append(engine.kill_worker())

    async def scenario() -> None:
        async with open_channel(engine.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            numbers = range(len(PROMPTS))
            alone = [(await generate(stub, number))[0] for number in numbers]
            assert all(len(tokens) == OUTPUT_TOKENS for tokens in alone)
            together = await asyncio.gather(*(generate(stub, number) for number in numbers))
            assert [tokens for tokens, _ in together] == alone
            struck = await asyncio.gather(*(generate(stub, number, strike) for number in numbers))
            assert [tokens for tokens, _ in struck] == alone
            assert any(resumes == 1 for _, resumes in struck)

    asyncio.run(scenario())
    assert killed
    assert engine.worker_pid != killed[0]
