"""A client may go at any moment of a cascade: every answer that was begun is closed."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CascadeSection, ConfidenceSection, StepSection
from ullage_router.call import Call, Event, Handler, deadline_of
from ullage_router.cascade.cascade import Cascade
from ullage_router.policy.cascade import ServiceLoad
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import shared_account
from ullage_router.tenants.session import TenantSession

SURE = -0.1
UNSURE = -9.0


class Told:
    """An answer of one token that counts how it ends."""

    def __init__(self, closed: list[str], name: str, logprob: float) -> None:
        self.accepted = inference_pb2.Accepted(model=name)
        self.output_tokens = 0
        self._closed = closed
        self._name = name
        self._logprob = logprob

    async def events(self) -> AsyncGenerator[Event, None]:
        entry = inference_pb2.TokenLogprob(logprob=self._logprob)
        yield Event(delta=inference_pb2.Delta(text="a", num_tokens=1, logprobs=[entry]))
        yield Event(finished=inference_pb2.Finished())

    def close(self) -> None:
        self._closed.append(self._name)


class Steps(Cascade):
    """Two steps by hand: the second is slow to notice that it is not wanted."""

    def __init__(self, logprob: float) -> None:
        steps = (StepSection(name="small", target="127.0.0.1:1"), StepSection(name="big"))
        confidence = ConfidenceSection(tokens=1, threshold_percent=60)
        policy = CascadeSection(name="c", steps=steps, confidence=confidence, parallel=True)
        super().__init__(policy, ServiceLoad, lambda attempt: None, 1.0)
        self._logprob = logprob
        self.closed: list[str] = []
        self.is_leaving = asyncio.Event()
        self.may_leave = asyncio.Event()

    def handler_of(self, step: int, own: object) -> Handler:
        return partial(self._begin_step, step)

    async def _begin_step(self, step: int, call: Call) -> Told:
        if step == 0:
            return Told(self.closed, "small", self._logprob)
        try:
            await asyncio.Event().wait()
        finally:
            self.is_leaving.set()
            await self.may_leave.wait()
        raise AssertionError


async def own(call: Call) -> Told:
    raise AssertionError


@pytest.mark.parametrize("logprob", [SURE, UNSURE])
def test_a_client_that_goes_leaves_no_answer_open(logprob: float) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20):
            steps = Steps(logprob)
            request = inference_pb2.GenerateRequest(text="Hi")
            record = RequestRecord("r")
            session = TenantSession(shared_account())
            call = Call(request, record, session, deadline_of(request, record, 30.0, 30.0))
            begun = asyncio.create_task(steps.run(call, own))
            if logprob == SURE:  # the answer is there, and what lost is being ended
                await steps.is_leaving.wait()
            else:
                while not steps.closed:  # noqa: ASYNC110 - thrown away, and the next is waited for
                    await asyncio.sleep(0)
            begun.cancel()
            await asyncio.sleep(0)
            steps.may_leave.set()
            with pytest.raises(asyncio.CancelledError):
                await begun
            assert "small" in steps.closed
            await steps.close()

    asyncio.run(scenario())
