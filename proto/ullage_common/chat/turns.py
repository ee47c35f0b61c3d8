"""Converts protobuf messages into the turns that chat templates expect."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import (
    Turn,
)

TURN_CHARACTERS = 64
"""Fixed cost of processing one turn, expressed as an equivalent number of characters."""
# Newer OpenAI clients use `developer` where templates use `system`.
_ROLES = {"developer": "system"}


def make_turns(messages: Iterable[inference_pb2.Message]) -> list[Turn]:
    """Convert each message to a turn that has only the fields set in the message."""
    names: dict[str, str] = {}
    turns = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls})
        turns.append(_turn(message, message.name or names.get(message.tool_call_id, "")))
    return turns


class Ending(TypedDict):
    """Arguments of `ChatTemplate.render` that say how a prompt ends."""

    add_generation_prompt: bool
    continue_final_message: bool


def ending(end: inference_pb2.PromptEnd) -> Ending:
    """Return the arguments of `ChatTemplate.render` that make a prompt end in this way."""
    is_continued = end == inference_pb2.PROMPT_END_FINAL_MESSAGE
    is_closed = end == inference_pb2.PROMPT_END_CLOSED
    return {
        "add_generation_prompt": not (is_continued or is_closed),
        "continue_final_message": is_continued,
    }


def num_characters(turns: Iterable[Turn]) -> int:
    """Count the characters in all turns, including tool calls."""
    return sum(map(_num_characters, turns))


def weight(turns: Sequence[Turn]) -> int:
    """Estimate the cost of processing turns: their characters, plus a fixed number per turn."""
    return num_characters(turns) + TURN_CHARACTERS * len(turns)


def _num_characters(turn: Turn) -> int:
    calls = turn.get("tool_calls", ())
    size = len(turn["content"]) + len(turn.get("reasoning_content", ""))
    return size + (len(json.dumps(calls)) if calls else 0)


def _turn(message: inference_pb2.Message, name: str) -> Turn:
    role = _ROLES.get(message.role, message.role)
    turn: Turn = {"role": role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if name:
        turn["name"] = name

    reasoning = message.reasoning  # each access copies the text
    if reasoning:
        turn["reasoning_content"] = reasoning
    # Templates that use `thinking` accept either it or content before a call, not both.
    if reasoning and not (message.tool_calls and message.content):
        turn["thinking"] = reasoning
    return turn


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> object:
    """Parse a tool call's arguments into a mapping for templates. Malformed arguments stay text."""
    try:
        parsed = json.loads(text or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # unpaired surrogates have no UTF-8
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
