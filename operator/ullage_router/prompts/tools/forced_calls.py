"""Forces a model to call a function.

The prompt ends with the beginning of a call in the model's own format, and a grammar enforces the
rest. If there is only one function, the prompt ends just before the arguments, and the grammar is
the schema of the arguments. If there are several, the answer begins with the name of the function
that the model chooses. The answer ends after the arguments.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.annotations import without_annotations
from ullage_router.prompts.tools.readers import ForcedReader
from ullage_router.prompts.tools.toolbox import Schema, Toolbox

# The beginning of a call, and the text between its function's name and its arguments.
_CALL = {
    ToolFormat.HERMES: ('<tool_call>\n{"name": "', '", "arguments": '),
    ToolFormat.LLAMA: ('{"name": "', '", "parameters": '),
    ToolFormat.LFM2: ('{"name": "', '", "arguments": '),
    ToolFormat.PLAIN: ('{"name": "', '", "arguments": '),
    ToolFormat.HARMONY: ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
}
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

    def reader(self) -> ForcedReader:
        """Return a new reader for one answer."""
        return ForcedReader(self.openings, self.name)


def force(toolbox: Toolbox, form: ToolFormat) -> Forced:
    """Return the prompt ending and grammar that force a call to a function in `toolbox.forced`."""
    begin, between = _CALL[form]
    schemas = dict[str, Schema]()
    ignored = tuple[str, ...]()
    for name in toolbox.forced:
        schema, removed = without_annotations(toolbox.parameters[name], f"tools.{name}.parameters")
        schemas[name] = _closed(schema)
        ignored += removed
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
    """Convert a text to a sequence of grammar terminals, with one for each special token."""
    for mark in _HARMONY_MARKS:
        text = text.replace(mark, f"\0{mark}\0")
    parts = [part for part in text.split("\0") if part]
    return " ".join(part if part in _HARMONY_MARKS else json.dumps(part) for part in parts)
