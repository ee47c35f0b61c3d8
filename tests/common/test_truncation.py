"""Prompts cut to their last tokens."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.truncation import truncated


@given(length=st.integers(1, 50), most=st.integers(-1, 60), context=st.integers(2, 40))
def test_the_last_tokens_are_kept(length: int, most: int, context: int) -> None:
    prompt = array("I", range(length))
    request = inference_pb2.GenerateRequest(truncate_prompt_tokens=most)
    kept = truncated(prompt, request, context)
    expected = {0: length, -1: context - 1}.get(most, most)
    assert kept == prompt[-min(expected, length) :]


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 9), (4, 6), (10, 1), (99, 1)])
def test_room_is_left_for_the_answer(max_tokens: int, kept: int) -> None:
    request = inference_pb2.GenerateRequest(
        truncate_prompt_tokens=-1,
        stop=inference_pb2.StopConditions(max_tokens=max_tokens),
    )
    assert len(truncated([7] * 50, request, 10)) == kept
