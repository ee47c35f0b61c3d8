"""A client's own time limit ends its request with the text so far."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_testing.fake_engine import Script

from ullage_common.wire.errors import ServiceError
from ullage_router.http.client_timeout import HEADER, MIN_S, time_limit_s

StartService = Callable[..., Any]
LONGEST_S = 540.0


async def complete(service: Any, seconds: str, **fields: Any) -> httpx.Response:
    body = {**(await body_of(service)), **fields}
    response: httpx.Response = await service.http.post(
        "/v1/completions", json=body, headers={HEADER: seconds}
    )
    return response


async def body_of(service: Any) -> dict[str, Any]:
    models = (await service.http.get("/v1/models")).json()
    return {"model": models["data"][0]["id"], "prompt": "Hi"}


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_the_text_so_far_is_the_answer(start_service: StartService, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script = Script(words=("Hello", " big"), pause=asyncio.Event())
            answer = await complete(service, "1", **fields)
            assert answer.status_code == 200
            assert '"finish_reason":"length","stop_reason":"timeout"' in answer.text
            assert "Hello" in answer.text
            assert " big" not in answer.text
            # The engine's memory is free again.
            await service.until(lambda: not service.engine.active)

    asyncio.run(scenario())


def test_without_a_token_it_is_an_error_that_names_the_limit(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script = Script(hold=asyncio.Event())
            answer = await complete(service, "0.5")
            assert answer.status_code == 504
            assert "0.5 s" in answer.json()["error"]["message"]
            await service.until(lambda: not service.engine.active)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_wrong_header_is_refused_by_name(start_service: StartService, path: str) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            body = {"input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
            answer = await service.http.post(
                path, json=body | await body_of(service), headers={HEADER: "soon"}
            )
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "INVALID_TIMEOUT"
            assert error["message"].startswith("x-ullage-timeout is 'soon'; send seconds")
            assert (await complete(service, "30")).status_code == 200

    asyncio.run(scenario())


@given(st.floats(min_value=MIN_S, max_value=1e9))
def test_a_client_can_only_shorten_the_limit(seconds: float) -> None:
    assert time_limit_s({HEADER: repr(seconds)}, LONGEST_S) == min(seconds, LONGEST_S)
    assert time_limit_s({}, LONGEST_S) == LONGEST_S


@given(
    st.one_of(
        st.text(max_size=60).filter(lambda text: not is_number(text)),
        st.sampled_from(["nan", "inf", "-inf", "0", "-3", "0.09", "", "1e999", "30s"]),
    )
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ServiceError, match="x-ullage-timeout is "):
        time_limit_s({HEADER: text}, LONGEST_S)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
