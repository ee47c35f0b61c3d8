"""Checks of servers with and without faults."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from ullage_testing.fake_openai import Behaviour, FakeServer, serving

from ullage_verify.client import OpenAIClient
from ullage_verify.criteria import Checks, Criterion
from ullage_verify.target import Target, describe


@pytest.fixture
def fake_server() -> Callable[..., contextlib.AbstractAsyncContextManager[FakeServer]]:
    return lambda **behaviour: serving(Behaviour(**behaviour))


Check = Callable[[Target, FakeServer, Checks], Any]


@pytest.fixture
def checked() -> Callable[..., list[Criterion]]:
    """Run a check against a server of some behaviour, and return its criteria."""

    def run(check: Check, silence_s: float = 5.0, **behaviour: Any) -> list[Criterion]:
        async def scenario() -> list[Criterion]:
            async with (
                serving(Behaviour(**behaviour)) as server,
                OpenAIClient(server.url, silence_s=silence_s) as client,
            ):
                target = await describe(client)
                checks = Checks("scenario", lambda _: None)
                await check(target, server, checks)
                return checks.criteria

        return asyncio.run(scenario())

    return run
