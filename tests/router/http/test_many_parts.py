"""Bodies of a legal size and very many parts: refused early, or kept off the event loop."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import validate_request
from ullage_router.http.openai import requests

if TYPE_CHECKING:
    StartService = Any

EMPTY = {"role": "user", "content": ""}
MANY: dict[str, tuple[Any, str]] = {
    "messages": ([EMPTY] * 8193, "messages"),
    "content": ([{"role": "user", "content": [{"type": "text"}] * 8193}], "messages[0].content"),
    "choice": ({"choice": [""] * 32769}, "structured_outputs.choice"),
    "stop": ([""] * 17, "stop"),
    "logit_bias": ({str(i): 1 for i in range(1025)}, "logit_bias"),
}


@pytest.mark.parametrize(("value", "field"), MANY.values(), ids=MANY)
def test_http_counts_before_anything_is_made_of_a_body(value: Any, field: str) -> None:
    name = field.partition(".")[0].partition("[")[0]
    body = json.dumps({"messages": [EMPTY], name: value})
    with pytest.raises(ServiceError) as caught:
        requests.parse_chat(body.encode())
    assert caught.value.metadata == {"field": field}


def test_grpc_counts_before_it_looks_at_each_message() -> None:
    wrong = pb.Message(role="wizard")
    calls = [pb.ToolCall(name="f")] * 128
    for messages in ([wrong] * 8193, [pb.Message(role="user", tool_calls=calls)] * 65):
        request = pb.GenerateRequest(messages=pb.Messages(messages=messages))
        with pytest.raises(ServiceError) as caught:
            validate_request(request)
        assert caught.value.metadata == {"field": "messages"}


def test_more_messages_than_the_context_has_tokens_are_not_shortened(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=300) as service:
            answer = await service.chat(messages=[EMPTY] * 301)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "messages")
            assert "send at most" in error["message"]

    asyncio.run(scenario())
