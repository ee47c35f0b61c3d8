"""Whose time limits let a request share another's generation."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CoalesceSection
from ullage_router.call import Call, Event, deadline_of
from ullage_router.pipeline.coalesce import Coalescer
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import shared_account
from ullage_router.tenants.session import TenantSession


class Told:
    accepted = inference_pb2.Accepted()
    output_tokens = 0

    async def events(self) -> AsyncGenerator[Event, None]:
        yield Event(finished=inference_pb2.Finished())

    def close(self) -> None:
        pass


def call(name: str, timeout_s: float) -> Call:
    sampling = inference_pb2.SamplingParams(temperature=0)
    request = inference_pb2.GenerateRequest(request_id=name, text="Hi", sampling=sampling)
    record = RequestRecord(name)
    session = TenantSession(shared_account())
    return Call(request, record, session, deadline_of(request, record, timeout_s, timeout_s))


@pytest.mark.parametrize(("first_s", "second_s", "joined"), [(30, 30, 1), (60, 30, 1), (30, 60, 0)])
def test_nobody_joins_what_may_end_before_its_own_limit(
    first_s: float, second_s: float, joined: int
) -> None:
    async def scenario() -> None:
        shared = Coalescer(CoalesceSection())
        begun = asyncio.Event()

        async def start(call: Call) -> Told:
            await begun.wait()
            return Told()

        calls = (call("a", first_s), call("b", second_s))
        answers = [asyncio.ensure_future(shared.share(each, start)) for each in calls]
        await asyncio.sleep(0)
        assert shared.joined == joined
        begun.set()
        for answer in answers:
            async for event in (await answer).events():
                assert event.HasField("finished")
            (await answer).close()

    asyncio.run(scenario())
