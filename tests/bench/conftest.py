"""A server to put load on."""

import contextlib
from collections.abc import Callable

import pytest
from ullage_testing.fake_openai import Behaviour, FakeServer, serving


@pytest.fixture
def fake_server() -> Callable[..., contextlib.AbstractAsyncContextManager[FakeServer]]:
    return lambda **behaviour: serving(Behaviour(**behaviour))
