"""Prefix hits, sessions, preemption and swapping on the real model change no token."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.channels import open_channel

if TYPE_CHECKING:
    Engine = Any

BLOCK_BYTES = 16 * 46_080  # of SmolLM2 in float32
COMMON = [(37 * place) % 4000 + 100 for place in range(86)]
OUTPUT_TOKENS = 16
NUM_CONVERSATIONS = 6
# Six conversations share five blocks and need one more each at first, three at their longest.
SMALL = 14 * BLOCK_BYTES


def turn(number: int, token_ids: list[int], salt: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        cache_salt=salt,
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True),
        session_id=f"conversation {number}",
    )


class Talk:
    """Six conversations at once, two turns each; alone: each turn computes all of its own."""

    def __init__(self, engine: "Engine", is_alone: bool = False) -> None:
        self._engine = engine
        self._is_alone = is_alone
        self.answers: list[list[int]] = []
        self.cached: list[int] = []
        self.preemptions = 0

    async def run(self, is_taught: bool) -> None:
        async with open_channel(self._engine.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if is_taught:
                await teach_short_answers(stub)
            talks = [self._converse(stub, number) for number in range(NUM_CONVERSATIONS)]
            self.answers = await asyncio.gather(*talks)
            await all_given_back(headroom_pb2_grpc.HeadroomServiceStub(channel))

    async def _converse(self, stub: Any, number: int) -> list[int]:
        prompt = [*COMMON, 200 + number, 300 + number]
        first = await self._ask(stub, number, prompt)
        second = await self._ask(stub, number, [*prompt, *first, 400 + number])
        return first + second

    async def _ask(self, stub: Any, number: int, token_ids: list[int]) -> list[int]:
        output: list[int] = []
        request = turn(number, token_ids, f"{number} {len(token_ids)}" if self._is_alone else "")
        while True:
            try:
                async for response in stub.Generate(request):
                    output += response.delta.token_ids
                    if response.HasField("finished"):
                        self.cached.append(response.finished.usage.cached_tokens)
                        self.preemptions += response.finished.preemptions
                return output
            except Exception as error:
                # A full pool is no fault: the router would wait just so.
                if "KV_HEADROOM" not in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                await asyncio.sleep(0.2)


async def teach_short_answers(stub: Any) -> None:
    """Lowers the expected output to a token: more is admitted than fits, and has to go again."""
    request = turn(99, COMMON[:1])
    async for response in stub.Generate(request):
        if response.delta.token_ids:
            request.stop.stop_token_ids.append(response.delta.token_ids[0])
            break
    request.session_id = ""
    for _ in range(26):
        await asyncio.gather(*[read_all(stub.Generate(request)) for _ in range(5)])


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def all_given_back(stub: Any) -> None:
    """Waits until nothing is held or promised."""
    async with asyncio.timeout(60):
        async for report in stub.WatchHeadroom(headroom_pb2.WatchHeadroomRequest()):
            state = report.headroom
            unheld = state.kv_free_bytes + state.kv_reclaimable_bytes
            if unheld == state.kv_pool_bytes and not state.kv_committed_bytes:
                return


@pytest.fixture(scope="module")
def talks(start_engine: Callable[..., "Engine"], engine: "Engine") -> dict[str, Talk]:
    talks = {"cached": Talk(engine), "alone": Talk(engine, is_alone=True)}
    for talk in talks.values():
        asyncio.run(talk.run(is_taught=False))
    small = start_engine(
        model={"max_model_len": 160, "quantization": "none"},
        memory={"max_kv": SMALL, "host_kv": SMALL},
    )
    talks["small"] = Talk(small)
    asyncio.run(talks["small"].run(is_taught=True))
    small.process.terminate()
    small.process.wait(20)
    return talks


@pytest.mark.parametrize("name", ["cached", "small"])
def test_text_is_what_it_is_without_sharing(talks: dict[str, Talk], name: str) -> None:
    assert talks[name].answers == talks["alone"].answers


def test_turns_find_what_earlier_ones_computed(talks: dict[str, Talk]) -> None:
    assert sum(talks["alone"].cached) == 0
    # Five first turns find the common blocks, six second turns nearly all they begin with.
    assert sum(count >= 80 for count in talks["cached"].cached) >= 5
    assert sum(count >= 96 for count in talks["cached"].cached) == NUM_CONVERSATIONS


def test_a_pool_too_small_costs_preemptions_and_no_error(talks: dict[str, Talk]) -> None:
    assert talks["alone"].preemptions == talks["cached"].preemptions == 0
    assert talks["small"].preemptions > 0
