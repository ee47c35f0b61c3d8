"""Parts of serialized messages are counted before anything is made of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire import message_size
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.limits import MAX_CALLS, MAX_MESSAGES, MAX_PROMPT_TOKENS
from ullage_common.wire.message_size import check_message, is_light

REQUEST = pb.GenerateRequest.DESCRIPTOR
MULTIPLEX = pb.MultiplexRequest.DESCRIPTOR


def refused(data: bytes) -> str:
    with pytest.raises(ServiceError) as caught:
        check_message(data, REQUEST)
    assert caught.value.metadata == {"field": "GenerateRequest"}
    return caught.value.message


def test_what_would_become_very_many_objects_is_refused() -> None:
    messages = b"\x0a\x00" * 4_000_000
    calls = pb.Message(tool_calls=[pb.ToolCall()] * 200_000)
    many: dict[str, Any] = {
        "messages": b"\x2a" + varint(len(messages)) + messages,
        "calls": pb.GenerateRequest(messages=pb.Messages(messages=[calls])).SerializeToString(),
        "stop": pb.GenerateRequest(
            stop=pb.StopConditions(stop_strings=[""] * 200_000)
        ).SerializeToString(),
        "biases": pb.GenerateRequest(
            sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(100_000), 1.0))
        ).SerializeToString(),
        "unknown": b"\xf8\x07\x01" * 1_000_000,
    }
    for name, data in many.items():
        assert "GenerateRequest has more than" in refused(data), name
    tokens = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MAX_PROMPT_TOKENS + 1)))
    assert f"{MAX_PROMPT_TOKENS} numbers in ids" in refused(tokens.SerializeToString())


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_the_largest_legal_requests_pass() -> None:
    call = pb.ToolCall(id="c", name="f", arguments="{}")
    turns = [pb.Message(role="assistant", tool_calls=[call] * MAX_CALLS)] * (
        MAX_MESSAGES // MAX_CALLS
    )
    turns += [pb.Message(role="tool", tool_call_id="c", content="x")] * (MAX_MESSAGES - len(turns))
    for request in (
        pb.GenerateRequest(messages=pb.Messages(messages=turns)),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[200_000] * MAX_PROMPT_TOKENS)),
        pb.GenerateRequest(text="x" * (8 << 20)),
    ):
        check_message(request.SerializeToString(), REQUEST)


@given(
    turns=st.lists(st.integers(min_value=0, max_value=4), max_size=8),
    ids=st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=8),
    biases=st.dictionaries(st.integers(0, 9), st.just(1.0), max_size=4),
)
def test_counts_are_exact(turns: list[int], ids: list[int], biases: dict[int, float]) -> None:
    request = pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=biases), step_limit_s=1.5)
    messages = [pb.Message(tool_calls=[pb.ToolCall(name="f")] * count) for count in turns]
    parts = 1 + 1 + sum(1 + 2 * count for count in turns) + 1 + 3 * len(biases)
    request.messages.CopyFrom(pb.Messages(messages=messages))
    request.stop.stop_token_ids.extend(ids)
    parts += 1 + bool(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_size, "MAX_PARTS", parts)
        check_message(request.SerializeToString(), REQUEST)
        patch.setattr(message_size, "MAX_PARTS", parts - 1)
        refused(request.SerializeToString())


@given(st.binary(max_size=80))
def test_any_bytes_can_be_counted(data: bytes) -> None:
    check_message(data, REQUEST)


@given(st.lists(st.integers(0, 300), max_size=6))
def test_numbers_of_a_list_in_pieces_are_counted_together(sizes: list[int]) -> None:
    """Every number has one byte."""
    data = b"".join(b"\x1a" + varint(size) + b"\x01" * size for size in sizes)
    num_bytes = sum(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_size, "MAX_PROMPT_TOKENS", num_bytes)
        check_message(data, MULTIPLEX)
        if num_bytes:
            patch.setattr(message_size, "MAX_PROMPT_TOKENS", num_bytes - 1)
            with pytest.raises(ServiceError, match="numbers in cancelled_tags"):
                check_message(data, MULTIPLEX)


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_light_message_has_few_parts_and_numbers(num_parts: int, num_numbers: int) -> None:
    calls = [pb.MultiplexCall()] * num_parts
    calls += [pb.MultiplexCall(request=prompt_of(num_numbers))]
    data = pb.MultiplexRequest(calls=calls).SerializeToString()
    parts = num_parts + (4 if num_numbers else 3)
    for more_parts, more_bytes in ((0, 0), (1, 0), (0, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_size, "LIGHT_PARTS", parts - more_parts)
            patch.setattr(message_size, "LIGHT_PACKED_BYTES", num_numbers - more_bytes)
            is_heavy = more_parts or (more_bytes and num_numbers)
            assert is_light(data, MULTIPLEX) is not bool(is_heavy)


def prompt_of(num_numbers: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * num_numbers))
