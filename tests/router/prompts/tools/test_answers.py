"""Deltas of answers with tools: each has pieces of one kind, in the order of the answer."""

import asyncio
import json
from collections.abc import AsyncGenerator

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.answers import read_calls
from ullage_router.prompts.tools.call_formats import CALL_FORMATS
from ullage_router.prompts.tools.readers import MarkedReader
from ullage_router.prompts.tools.tool_use import ToolUse

Event = inference_pb2.GenerateResponse
Delta = inference_pb2.Delta
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"One. {CALL} Two. {CALL} Three."
USE = ToolUse(new_reader=lambda: MarkedReader(CALL_FORMATS[ToolFormat.HERMES], {"f": {}}))


async def read(*texts: str) -> list[Delta]:
    """Return the deltas of an answer whose tokens are its characters."""

    async def events() -> AsyncGenerator[Event, None]:
        for text in texts:
            logprobs = [inference_pb2.TokenLogprob(token=character) for character in text]
            ids = [ord(character) for character in text]
            yield Event(
                delta=Delta(text=text, num_tokens=len(text), token_ids=ids, logprobs=logprobs)
            )
        yield Event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP))

    found = [event async for event in read_calls(events(), USE, 1)]
    assert found[-1].finished.reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    return [event.delta for event in found[:-1]]


def parts(deltas: list[Delta]) -> list[str]:
    """Return the texts and the arguments, neighbours of one kind joined."""
    joined: list[str] = []
    was_call = None
    for delta in deltas:
        assert bool(delta.text) + bool(delta.tool_calls) <= 1
        for piece in delta.tool_calls:
            if piece.name:
                joined.append("")
            joined[-1] += piece.arguments
        if delta.text and was_call in (None, True):
            joined.append("")
        joined[-1:] = [joined[-1] + delta.text] if joined else []
        if delta.text or delta.tool_calls:
            was_call = bool(delta.tool_calls)
    return joined


def test_each_delta_has_one_kind_of_piece_wherever_the_answer_is_cut() -> None:
    for cut in range(len(ANSWER) + 1):
        deltas = asyncio.run(read(ANSWER[:cut], ANSWER[cut:]))
        one, first, two, second, three = parts(deltas)
        assert [one, two.strip(), three.strip()] == ["One.", "Two.", "Three."]
        assert json.loads(first) == json.loads(second) == {"a": 1}
        # What the engine said about the tokens stays whole, and in its order.
        assert sum(delta.num_tokens for delta in deltas) == len(ANSWER)
        assert "".join(chr(each) for delta in deltas for each in delta.token_ids) == ANSWER
        assert "".join(each.token for delta in deltas for each in delta.logprobs) == ANSWER
