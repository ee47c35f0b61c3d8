"""The formats in which models write tool calls, detected from a chat template's source."""

import json
import re
import string
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

from ullage_common.chat.client_text import plain_text

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALPHANUMERICS = string.digits + string.ascii_letters

Turn = dict[str, Any]
"""A turn of a conversation.

A turn has `role` and `content`, both text. It may have `tool_calls` (each {"id", "type":
"function", "function": {"name", "arguments"}}), `tool_call_id`, `name`, `reasoning_content` and
`thinking`. The last two contain the same text, because some templates use one name and some the
other.
"""


class ToolFormat(Enum):
    """The format in which a model writes tool calls."""

    HERMES = "hermes"
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, also used by Qwen."""
    LLAMA = "llama"
    """The whole answer is {"name": ..., "parameters": {...}}, possibly after <|python_tag|>."""
    LFM2 = "lfm2"
    """<|tool_call_start|>[name(argument=value), ...]<|tool_call_end|>, in Python's syntax."""
    HARMONY = "harmony"
    """A `commentary` message to=functions.name is a call. An `analysis` message is reasoning."""
    PLAIN = "plain"
    """The whole answer is {"name": ..., "arguments": {...}}."""
    MISTRAL_LIST = "mistral-list"
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], of Mistral's older templates."""
    MISTRAL = "mistral"
    """[TOOL_CALLS]name[ARGS]{...} for each call, of Mistral's newer templates."""
    QWEN_XML = "qwen-xml"
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""
    GLM = "glm"
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""
    DEEPSEEK_V3 = "deepseek-v3"
    """A call is `function`, a separator, the name, and the arguments in a fence of JSON."""
    DEEPSEEK_V31 = "deepseek-v3.1"
    """A call is the name, a separator and the arguments."""
    KIMI = "kimi"
    """A section of calls, each with an id such as functions.name:0 before its arguments."""
    GRANITE = "granite"
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...], also used by Phi-4-mini."""


# Groups of marks, all of which a template of the format has. The first format that fits is used,
# so formats that share marks with others come before them.
_MARKS = (
    (ToolFormat.HARMONY, ("<|channel|>",)),
    (ToolFormat.KIMI, ("<|tool_calls_section_begin|>",)),
    (ToolFormat.DEEPSEEK_V3, ("<\uff5ctool▁calls▁begin\uff5c>", "```json")),
    (ToolFormat.DEEPSEEK_V31, ("<\uff5ctool▁calls▁begin\uff5c>",)),
    (ToolFormat.LFM2, ("<|tool_list_start|>",)),
    (ToolFormat.LFM2, ("<|tool_call_start|>",)),
    (ToolFormat.QWEN_XML, ("<tool_call>", "<function=", "<parameter=")),
    (ToolFormat.GLM, ("<tool_call>", "<arg_key>")),
    (ToolFormat.HERMES, ("<tool_call>",)),
    (ToolFormat.GRANITE, ("<|tool_call|>",)),
    (ToolFormat.MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (ToolFormat.MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (ToolFormat.LLAMA, ("<|python_tag|>",)),
    (ToolFormat.LLAMA, ("ipython",)),
)


def tool_format(template: str) -> ToolFormat:
    """Detect a model's tool-call format from the source of its chat template."""
    for tool_format, marks in _MARKS:
        if all(mark in template for mark in marks):
            return tool_format
    return ToolFormat.PLAIN


_ONE_CALL_A_TURN = frozenset({ToolFormat.LLAMA, ToolFormat.HARMONY})


def for_format(turns: Sequence[Turn], form: ToolFormat) -> list[Turn]:
    """Split turns that have more tool calls than templates of this format accept in one turn."""
    if form not in _ONE_CALL_A_TURN:
        return list(turns)
    return [each for turn in _with_results(turns) for each in _one_by_one(*turn)]


def described(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Mapping[str, Any]]:
    """Return the tools, adding missing descriptions as empty texts if the format needs them."""
    return [_described(tool) if form is ToolFormat.HARMONY else tool for tool in tools]


def with_calls_as_text(turns: Sequence[Turn], form: ToolFormat) -> list[Turn]:
    """Move tool calls into the turns' content, for templates that do not render calls."""
    return [_as_text(turn, form) if turn.get("tool_calls") else turn for turn in turns]


def with_short_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Replace tool call ids with ids of nine letters and digits, as Mistral's templates require.

    Ids that already have this form are kept. Others, such as OpenAI's, are replaced by a hash.
    Equal ids have equal hashes, so results still match their calls, and each prompt of a
    conversation still begins with the previous one.
    """
    return [_with_short_ids(turn) for turn in turns]


def _with_short_ids(turn: Turn) -> Turn:
    shortened = dict(turn)
    if calls := turn.get("tool_calls"):
        shortened["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in calls]
    if call_id := turn.get("tool_call_id"):
        shortened["tool_call_id"] = _short_id(call_id)
    return shortened


def with_numbered_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Replace tool call ids with functions.name:number, counted over the whole conversation.

    Kimi's templates write the ids into the prompt, and its models know them only in this form.
    """
    numbered = []
    ids: dict[str, str] = {}
    number = 0
    for turn in turns:
        changed = dict(turn)
        if calls := turn.get("tool_calls"):
            changed["tool_calls"] = []
            for call in calls:
                ids[plain_text(call["id"])] = "functions." + call["function"]["name"] + f":{number}"
                changed["tool_calls"].append(call | {"id": ids[plain_text(call["id"])]})
                number += 1
        if call_id := turn.get("tool_call_id"):
            changed["tool_call_id"] = ids.get(plain_text(call_id), call_id)
        numbered.append(changed)
    return numbered


def with_arguments_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Convert the arguments of tool calls to JSON text, for templates that add them to texts."""
    return [_with_text_arguments(turn) if turn.get("tool_calls") else turn for turn in turns]


def _with_text_arguments(turn: Turn) -> Turn:
    return turn | {"tool_calls": [_with_text(call) for call in turn["tool_calls"]]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return {**call, "function": {**function, "arguments": text}}


def _short_id(call_id: str) -> str:
    plain = plain_text(call_id)
    if _SHORT_ID.fullmatch(plain):
        return call_id
    number = int.from_bytes(blake2b(plain.encode(), digest_size=16).digest(), "big")
    characters = []
    for _ in range(9):
        number, place = divmod(number, len(_ALPHANUMERICS))
        characters.append(_ALPHANUMERICS[place])
    return "".join(characters)


def with_tools_as_text(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """List the tools in the system turn, for templates that do not support tools."""
    if not tools:
        return list(turns)
    text = _instruction(tools)
    if turns and turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def with_results_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Convert tool results to user turns.

    This is for templates that support neither tools nor tool calls.
    """
    return [_as_result(turn) for turn in _joined_results(turns)]


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    form = '{"name": the function\'s name, "arguments": {its arguments}}'
    return (
        f"These functions can be called:\n{functions}\n"
        f"To call one, answer with nothing but a JSON object: {form}"
    )


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    text = function.get("description") or ""
    return {**tool, "function": {**function, "description": text}}


def _with_results(turns: Sequence[Turn]) -> list[tuple[Turn, list[Turn]]]:
    """Pair every turn with a list of the tool results that follow it.

    The list is empty unless the turn has several tool calls. All other results remain separate
    turns.
    """
    grouped: list[tuple[Turn, list[Turn]]] = []
    for turn in turns:
        if turn["role"] == "tool" and grouped and len(grouped[-1][0].get("tool_calls", ())) > 1:
            grouped[-1][1].append(turn)
        else:
            grouped.append((turn, []))
    return grouped


def _one_by_one(turn: Turn, results: Sequence[Turn]) -> list[Turn]:
    """Split a turn with several tool calls into one turn per call, each followed by its result."""
    calls = turn.get("tool_calls", ())
    if len(calls) < 2:
        return [turn]
    rewritten: list[Turn] = []
    for call in calls:
        first = {"role": "assistant", "content": ""} if rewritten else turn
        rewritten.append(first | {"tool_calls": [call]})
        rewritten += [result for result in results if result.get("tool_call_id") == call["id"]]
    ids = {call["id"] for call in calls}
    return rewritten + [result for result in results if result.get("tool_call_id") not in ids]


def _as_text(turn: Turn, form: ToolFormat) -> Turn:
    calls = [call["function"] for call in turn["tool_calls"]]
    if form is ToolFormat.LFM2:
        listed = ", ".join(map(_python_call, calls))
        text = f"<|tool_call_start|>[{listed}]<|tool_call_end|>"
    else:
        text = "\n".join(_json(call) for call in calls)
    content = "\n".join(filter(None, (turn["content"], text)))
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": content}


def _python_call(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
    return f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _joined_results(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Group consecutive tool results. Each of the other turns is a group of its own."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if turn["role"] == "tool" and groups and groups[-1][0]["role"] == "tool":
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return groups


def _as_result(group: Sequence[Turn]) -> Turn:
    if group[0]["role"] != "tool":
        return group[0]
    lines = [f"{turn.get('name') or 'The function'} returned: {turn['content']}" for turn in group]
    return {"role": "user", "content": "\n".join(lines)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
