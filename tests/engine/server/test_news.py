"""When the one who sends an answer is woken for its tokens, and what it finds then."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, cast

import grpc
import pytest
from ullage_testing import jumping_clock

from ullage_common.wire.errors import ServiceError
from ullage_common.wire.flow_control import SendPace
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
from ullage_engine.server.journal import JournalEntry
from ullage_engine.server.request import SamplePlan, ValidatedRequest
from ullage_engine.server.samples import SampleGroup
from ullage_engine.tokenizer.detokenizer import TokenBytes

PACE = SendPace(pause_s=10.0, max_tokens=4)
"""A tick is 10 s after the loop's first time, 1000."""


class Bytes:
    """Each token is a byte."""

    def text_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return False


class Reader:
    """Notes the texts of the samples at each of its wakes, and how the last one ended."""

    def __init__(self, num_samples: int = 1) -> None:
        request = EngineRequest(
            request_id="r",
            token_ids=[1],
            num_prompt_tokens=1,
            max_tokens=99,
            sampling=SamplingParams(),
        )
        samples = SamplePlan(num_samples, num_samples)
        job = ValidatedRequest("r", request, (), False, False, samples=samples)
        self.group = SampleGroup(job, cast(TokenBytes, Bytes()), pace=PACE)
        self.entries = self.group.entries
        self.woken: list[list[str] | None] = []
        self.reason = ""
        self.reading: asyncio.Task[None] | None = None

    def read(self, until: float = math.inf) -> None:
        """Begins to read; an alarm ends it."""
        self.reading = asyncio.create_task(self._read(until))

    async def _read(self, until: float) -> None:
        while not self.group.all_finishes_sent:
            updates = await self.group.next_updates(until)
            self.woken.append(None if updates is None else [each.text for each in updates])
            if updates is None:
                return
            self.reason = next((each.finish.reason for each in updates if each.finish), "")


async def push(entry: JournalEntry, text: str, finish: Any = "") -> None:
    """A step's tokens of one sample come."""
    entry.append_output(TokenOutput(entry.key, list(text.encode()), finish))
    await jump(0.0)


async def jump(seconds: float) -> None:
    await jumping_clock.clock().jump(seconds)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    jumping_clock.run(scenario(), jumping_clock.StandingLoop)


def test_a_first_token_wakes_at_once_and_those_before_the_tick_once() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.read()
        for text in "abc":
            await push(reader.entries[0], text)
        await jump(9.0)
        assert reader.woken == [["a"]]
        await jump(1.0)
        assert reader.woken == [["a"], ["bc"]]
        await push(reader.entries[0], "d")
        await jump(10.0)
        await jump(10.0)
        await push(reader.entries[0], "e")
        assert reader.woken[2:] == [["d"], ["e"]], "none came since the tick"

    run(scenario)


def test_enough_tokens_and_ends_wake_at_once() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.read()
        await push(reader.entries[0], "a")
        for text in "bcde":
            assert len(reader.woken) == 1
            await push(reader.entries[0], text)
        assert reader.woken == [["a"], ["bcde"]]
        await push(reader.entries[0], "f", "length")
        assert (reader.woken[2:], reader.reason) == ([["f"]], "length")

        failing = Reader()
        failing.read()
        await push(failing.entries[0], "a")
        await push(failing.entries[0], "b")
        failing.entries[0].fail(ServiceError(grpc.StatusCode.INTERNAL, "LOST", "it is lost"))
        await jump(0.0)
        assert failing.reading is not None
        assert failing.reading.done()
        with pytest.raises(ServiceError, match="it is lost"):
            failing.reading.result()

    run(scenario)


def test_news_of_one_sample_takes_along_what_waits_of_others() -> None:
    async def scenario() -> None:
        reader = Reader(num_samples=2)
        reader.read()
        first, second = reader.entries
        await push(first, "a")
        await push(second, "x")
        await push(first, "b")
        assert reader.woken == [["a"], ["x"]]
        await push(second, "y", "length")
        assert reader.woken == [["a"], ["x"], ["b", "y"]]

    run(scenario)


def test_tokens_that_wait_are_no_news_and_come_with_the_end_that_time_brings() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.read(until=1005.0)
        await push(reader.entries[0], "a")
        await push(reader.entries[0], "b")
        await jump(5.0)
        assert reader.woken == [["a"], None]
        reader.group.end("timeout")
        reader.read()
        await jump(0.0)
        assert (reader.woken[2:], reader.reason) == ([["b"]], "timeout")

    run(scenario)
