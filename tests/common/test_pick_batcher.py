"""The client's calls of Pick: shared by like requests, and never the end of those to come."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.tickets.client import Pick, PickBatcher
from ullage_common.wire.errors import ServiceError

Answer = Callable[[pb.PickRequest], pb.PickResponse]
ENOUGH_S = 20.0


class Router:
    """Answers calls one by one as it was told, the last way for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[pb.PickRequest] = []

    async def Pick(self, request: pb.PickRequest, **options: Any) -> pb.PickResponse:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request)


def all_in_one(request: pb.PickRequest) -> pb.PickResponse:
    placed = [
        pb.Placed(id=i, ticket=f"t{i}", max_tokens=4, count=each.count or 1)
        for i, each in enumerate(request.requests, 1)
    ]
    return pb.PickResponse(placed=placed, engines=["e:1"])


def nonsense(request: pb.PickRequest) -> pb.PickResponse:
    return pb.PickResponse(placed=[pb.Placed(id=1, engine=7, ticket="t")])


def nothing(request: pb.PickRequest) -> pb.PickResponse:
    return pb.PickResponse()


def one_each(request: pb.PickRequest) -> pb.PickResponse:
    """As a router answers that knows no counts."""
    sizes = [each.prompt_tokens for each in request.requests]
    placed = [pb.Placed(id=size, ticket=f"t{size}", max_tokens=4) for size in sizes]
    return pb.PickResponse(placed=placed, engines=["e:1"])


def in_parts(request: pb.PickRequest) -> pb.PickResponse:
    """Two of each, and the rest is refused."""
    placed = []
    for each in request.requests:
        placed.append(pb.Placed(id=each.prompt_tokens, ticket=f"t{each.prompt_tokens}", count=2))
        if each.count > 2:
            placed.append(pb.Placed(refusal=pb.Refusal(reason="FULL"), count=each.count - 2))
    return pb.PickResponse(placed=placed, engines=["e:1"])


def too_many(request: pb.PickRequest) -> pb.PickResponse:
    return pb.PickResponse(placed=[pb.Placed(id=1, count=(1 << 32) - 1)], engines=["e:1"])


def broken(request: pb.PickRequest) -> pb.PickResponse:
    raise TypeError("metadata is not made of text")


def failing(code: grpc.StatusCode) -> Answer:
    def fail(request: pb.PickRequest) -> pb.PickResponse:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, metadata, metadata, "gone")

    return fail


def batcher_of(router: Router) -> PickBatcher:
    return PickBatcher(router, ())  # type: ignore[arg-type]


def request(prompt: int = 2, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * prompt), **more)


async def place(
    batcher: PickBatcher, asked: pb.GenerateRequest, avoid: tuple[str, ...] = ()
) -> Any:
    deadline = asyncio.get_running_loop().time() + ENOUGH_S
    return await batcher.place(asked, avoid, deadline)


@pytest.mark.parametrize("answer", [nonsense, broken])
def test_whatever_fails_the_next_are_served(answer: Answer) -> None:
    async def scenario() -> None:
        batcher = batcher_of(Router(answer, all_in_one))
        with pytest.raises(ServiceError, match="asking the router for a place failed") as caught:
            await place(batcher, request())
        assert caught.value.reason == "PICK_FAILED"
        assert (await place(batcher, request())).engine == "e:1"
        await batcher.close()

    asyncio.run(scenario())


def test_an_answer_is_not_believed_to_be_endless() -> None:
    async def scenario() -> None:
        batcher = batcher_of(Router(too_many, all_in_one))
        assert (await place(batcher, request())).id == 1
        assert (await place(batcher, request())).ticket == "t1"
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        (all_in_one, [1, 1, 1, 2, 2, 3]),
        (one_each, [2, None, None, 3, None, 4]),
        (in_parts, [2, 2, None, 3, 3, 4]),
        (nothing, [None] * 6),
    ],
)
def test_nobody_gets_anothers_ticket(answer: Answer, ids: list[int | None]) -> None:
    async def scenario() -> None:
        batcher = batcher_of(Router(answer))
        prompts = (2, 2, 2, 3, 3, 4)
        found = await asyncio.gather(*(place(batcher, request(prompt)) for prompt in prompts))
        assert [pick and pick.id for pick in found] == ids, "the rest is the router's"
        await batcher.close()

    asyncio.run(scenario())


def test_like_requests_are_asked_for_as_one() -> None:
    async def scenario() -> None:
        router = Router(all_in_one)
        batcher = batcher_of(router)
        asked = [(request(), ())] * 5 + [(request(3), ()), (request(3), ("e:9",))]
        asked += [(request(session_id="s"), ())] * 2
        found = await asyncio.gather(*(place(batcher, each, avoid) for each, avoid in asked))
        (call,) = router.asked
        assert [each.count for each in call.requests] == [5, 0, 0, 0, 0]
        assert [pick.ticket for pick in found] == ["t1"] * 5 + ["t2", "t3", "t4", "t5"]
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "times"), [(grpc.StatusCode.UNAVAILABLE, 2), (grpc.StatusCode.DEADLINE_EXCEEDED, 1)]
)
def test_only_reports_that_were_not_heard_are_said_again(code: grpc.StatusCode, times: int) -> None:
    async def scenario() -> None:
        router = Router(failing(code), all_in_one)
        batcher = batcher_of(router)
        for _ in range(2):
            batcher.on_accepted(Pick(7, "e:1", "t", 4))
            batcher.on_ended(Pick(7, "e:1", "t", 4))
        async with asyncio.timeout(ENOUGH_S):
            while not router.asked:  # noqa: ASYNC110 - the router is another's
                await asyncio.sleep(0.01)
        await batcher.close()
        for call in router.asked:
            assert (list(call.accepted), list(call.ended)) == ([7, 7], [7, 7])
        assert len(router.asked) == times

    asyncio.run(scenario())


def test_a_place_that_comes_as_its_caller_leaves_is_given_back() -> None:
    async def scenario() -> None:
        def leaving(request: pb.PickRequest) -> pb.PickResponse:
            if request.requests:
                # Before the caller resumes, which has its place by then.
                asyncio.get_running_loop().call_soon(asked.cancel)
            return all_in_one(request)

        router = Router(leaving)
        batcher = batcher_of(router)
        asked = asyncio.create_task(place(batcher, request()))
        with pytest.raises(asyncio.CancelledError):
            await asked
        await batcher.close()
        assert [list(call.ended) for call in router.asked] == [[], [1]]

    asyncio.run(scenario())
