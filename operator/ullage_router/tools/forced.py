"""Forcing a call: the prompt begins it in the model's own format and a grammar does the rest.

With one function the prompt goes on to its arguments, and the grammar is their schema; with several
the answer begins with which one it is. Nothing follows the arguments, so the answer ends there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ullage_router.tools.readers import ForcedReader
from ullage_router.tools.toolbox import Schema, Toolbox
from ullage_rpc.tool_formats import ToolFormat

# What a call begins with, and what stands between its function's name and its arguments.
_CALL = {
    ToolFormat.HERMES: ('<tool_call>\n{"name": "', '", "arguments": '),
    ToolFormat.LLAMA: ('{"name": "', '", "parameters": '),
    ToolFormat.LFM2: ('{"name": "', '", "arguments": '),
    ToolFormat.PLAIN: ('{"name": "', '", "arguments": '),
    ToolFormat.HARMONY: ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
}
# Free white space lets a model write nothing but white space; what is not understood is refused.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
_SPECIAL = ("<|constrain|>", "<|message|>")
# Keywords with which a schema may name properties elsewhere than in `properties`.
_COMPOSED = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "if"}
)


@dataclass(frozen=True, slots=True)
class Forced:
    """A call that must be made."""

    opening: str
    """Goes to the end of the prompt."""
    json_schema: str
    """Grammar of the answer; empty: it is `lark`."""
    lark: str
    openings: Mapping[str, str]
    name: str
    """Function that the opening names; empty for none."""

    def reader(self) -> ForcedReader:
        return ForcedReader(self.openings, self.name)


def force(toolbox: Toolbox, form: ToolFormat) -> Forced:
    """How to have one of `toolbox.forced` called."""
    begin, between = _CALL[form]
    schemas = {name: _closed(toolbox.parameters[name]) for name in toolbox.forced}
    if len(schemas) == 1:
        ((name, schema),) = schemas.items()
        # A blank at the prompt's end would keep the model from the token that begins with it.
        opening = (begin + name + between).rstrip()
        return Forced(opening, json.dumps(schema), "", {}, name)
    openings = {name: name + between for name in schemas}
    return Forced(begin, "", _lark(openings, schemas), openings, "")


def _closed(schema: Schema) -> Schema:
    """The schema without properties that it does not name, where that is what it leaves open."""
    if "properties" not in schema or _COMPOSED & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


def _lark(openings: Mapping[str, str], schemas: Mapping[str, Schema]) -> str:
    rules = [
        f"call{i}: {_terminals(openings[name])} %json {_compact(schema)}"
        for i, (name, schema) in enumerate(schemas.items())
    ]
    start = " | ".join(f"call{i}" for i in range(len(rules)))
    return "\n".join([f"start: {start}", *rules])


def _compact(schema: Schema) -> str:
    return json.dumps({**schema, "x-guidance": _COMPACT})


def _terminals(text: str) -> str:
    """A text as the grammar's terminals; special tokens are such and no text."""
    for mark in _SPECIAL:
        text = text.replace(mark, f"\0{mark}\0")
    parts = [part for part in text.split("\0") if part]
    return " ".join(part if part in _SPECIAL else json.dumps(part) for part in parts)
