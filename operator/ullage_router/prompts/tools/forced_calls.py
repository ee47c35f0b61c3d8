"""Forces a model to call a function.

The prompt ends with the beginning of a call in the model's own format, and a grammar enforces the
rest. If there is only one function, the prompt ends just before the arguments, and the grammar is
the schema of the arguments. If there are several, the answer begins with the name of the function
that the model chooses. The answer ends after the arguments.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.annotations import without_annotations
from ullage_router.prompts.tools.call_formats import (
    CALL_FORMATS,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_CALLS,
    KIMI_CALLS_END,
    CallFormat,
    Functions,
)
from ullage_router.prompts.tools.pieces import Reader
from ullage_router.prompts.tools.readers import ForcedReader, MarkedReader
from ullage_router.prompts.tools.toolbox import Schema, Toolbox

# The beginning of a call, and the text between its function's name and its arguments.
_CALL = {
    ToolFormat.HERMES: ('<tool_call>\n{"name": "', '", "arguments": '),
    ToolFormat.LLAMA: ('{"name": "', '", "parameters": '),
    ToolFormat.LFM2: ('{"name": "', '", "arguments": '),
    ToolFormat.PLAIN: ('{"name": "', '", "arguments": '),
    ToolFormat.HARMONY: ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
    ToolFormat.MISTRAL_LIST: ('[TOOL_CALLS][{"name": "', '", "arguments": '),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]"),
    # A grammar for arguments in XML could not follow their schemas.
    ToolFormat.QWEN_XML: ('<tool_call>\n{"name": "', '", "arguments": '),
    ToolFormat.GLM: ('<tool_call>{"name": "', '", "arguments": '),
    ToolFormat.DEEPSEEK_V3: (
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}",
        "\n```json\n",
    ),
    ToolFormat.DEEPSEEK_V31: (f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}", DEEPSEEK_SEPARATOR),
    ToolFormat.KIMI: (f"{KIMI_CALLS}{KIMI_CALL}functions.", f":0{KIMI_ARGUMENTS}"),
    ToolFormat.GRANITE: ('<|tool_call|>[{"name": "', '", "arguments": '),
}
# The text after the arguments of a call, the text before the next name, and the text after the last
# call. Other formats have one forced call.
FURTHER = {
    ToolFormat.HERMES: ("}\n</tool_call>", '\n<tool_call>\n{"name": "', ""),
    ToolFormat.QWEN_XML: ("}\n</tool_call>", '\n<tool_call>\n{"name": "', ""),
    ToolFormat.GLM: ("}</tool_call>", '\n<tool_call>{"name": "', ""),
    ToolFormat.MISTRAL_LIST: ("}", ', {"name": "', "]"),
    ToolFormat.MISTRAL: ("", "[TOOL_CALLS]", ""),
    ToolFormat.DEEPSEEK_V3: (
        f"\n```{DEEPSEEK_CALL_END}",
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}",
        DEEPSEEK_CALLS_END,
    ),
    ToolFormat.DEEPSEEK_V31: (DEEPSEEK_CALL_END, DEEPSEEK_CALL, DEEPSEEK_CALLS_END),
    ToolFormat.KIMI: (KIMI_CALL_END, f"{KIMI_CALL}functions.", KIMI_CALLS_END),
    ToolFormat.GRANITE: ("}", ', {"name": "', "]"),
}
_IN_JSON = (ToolFormat.QWEN_XML, ToolFormat.GLM)
"""Formats whose forced calls are in JSON, as those of Hermes are."""
MAX_FORCED_CALLS = 16
"""Maximum number of calls in an answer with forced calls."""
# With free whitespace, a model may write whitespace forever. Unknown keywords are refused.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
_HARMONY_MARKS = ("<|constrain|>", "<|message|>")
# Keywords by which a schema may name properties outside of `properties`.
_COMPOSED = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "if"}
)


@dataclass(frozen=True, slots=True)
class Forced:
    """An ending for the prompt and a grammar, which together force the model to make a call."""

    opening: str
    """Text that is appended to the prompt."""
    json_schema: str
    """JSON Schema that the answer must follow (empty if the grammar is `lark`)."""
    lark: str
    openings: Mapping[str, str]
    """Text that precedes the arguments in the answer, by function. Empty if `name` is set."""
    name: str
    """Name of the only possible function, which `opening` contains (empty if there are several)."""
    ignored: tuple[str, ...] = ()
    """Paths of the annotations in the functions' schemas that the grammar leaves out."""
    calls: CallFormat | None = None
    """Format of several calls, or None if there is one."""
    functions: Functions = field(default_factory=dict)
    """The functions of several calls."""

    def reader(self) -> Reader:
        """Return a new reader for one answer."""
        if self.calls is None:
            return ForcedReader(self.openings, self.name)
        reader = MarkedReader(self.calls, self.functions)
        reader.push(self.opening)
        return reader


def force(toolbox: Toolbox, form: ToolFormat) -> Forced:
    """Return the prompt ending and grammar that force a call to a function in `toolbox.forced`."""
    begin, between = _CALL[form]
    schemas = dict[str, Schema]()
    ignored = tuple[str, ...]()
    for name in toolbox.forced:
        schema, removed = without_annotations(toolbox.parameters[name], f"tools.{name}.parameters")
        schemas[name] = _closed(schema)
        ignored += removed
    if toolbox.several_forced and form in FURTHER:
        openings = {name: name + between for name in schemas}
        lark = _lark(openings, schemas, *FURTHER[form])
        calls = CALL_FORMATS[ToolFormat.HERMES if form in _IN_JSON else form]
        return Forced(begin, "", lark, openings, "", ignored, calls, schemas)
    if len(schemas) == 1:
        ((name, schema),) = schemas.items()
        # A prompt that ends with a blank would rule out tokens that begin with a blank.
        opening = (begin + name + between).rstrip()
        return Forced(opening, json.dumps(schema), "", {}, name, ignored)
    openings = {name: name + between for name in schemas}
    return Forced(begin, "", _lark(openings, schemas), openings, "", ignored)


def _closed(schema: Schema) -> Schema:
    """Return the schema with additional properties forbidden if it lists its properties directly.

    Any other schema is returned unchanged.
    """
    if "properties" not in schema or _COMPOSED & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


def _lark(
    openings: Mapping[str, str],
    schemas: Mapping[str, Schema],
    after: str = "",
    again: str = "",
    last: str = "",
) -> str:
    """Return a grammar for one call, or for several if there is a text before each further one.

    Args:
        openings: the text before the arguments, by function.
        schemas: the schema of the arguments, by function.
        after: text after the arguments of each call.
        again: text before the name of each further call.
        last: text after the last call.
    """
    rules = [
        f"call{i}: {_terminals(openings[name])} %json {_compact(schema)}"
        for i, (name, schema) in enumerate(schemas.items())
    ]
    start = " | ".join(f"call{i}" for i in range(len(rules)))
    if not again:
        return "\n".join([f"start: {start}", *rules])
    further = f"({_terminals(again)} call){{0,{MAX_FORCED_CALLS - 1}}}"
    first = f"start: call {further} {_terminals(last)}".rstrip()
    return "\n".join([first, f"call: ({start}) {_terminals(after)}".rstrip(), *rules])


def _compact(schema: Schema) -> str:
    return json.dumps({**schema, "x-guidance": _COMPACT})


def _terminals(text: str) -> str:
    """Convert a text to a sequence of grammar terminals, with one for each special token."""
    for mark in _HARMONY_MARKS:
        text = text.replace(mark, f"\0{mark}\0")
    parts = [part for part in text.split("\0") if part]
    return " ".join(part if part in _HARMONY_MARKS else json.dumps(part) for part in parts)
