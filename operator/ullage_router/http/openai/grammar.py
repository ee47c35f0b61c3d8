"""Convert `response_format` or `structured_outputs` of a body to the wire's grammar."""

import re
from collections.abc import Callable

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.http.openai.schemas import (
    Common,
    ResponseFormat,
    StructuredOutputs,
)

Grammar = inference_pb2.Grammar

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = "text, json_object, json_schema"
_SCHEMA = re.compile(r"\s*(\{|true\b|false\b)")
"""Beginning of a JSON Schema: an object, or a boolean."""


def grammar(common: Common) -> Grammar | None:
    """Return the grammar that the body asks for; None: any text.

    Raises:
        ServiceError: The grammar is incomplete, or there are two grammars.
    """
    if common.response_format is None and common.structured_outputs is None:
        return None

    asked = common.structured_outputs or StructuredOutputs()
    forms: dict[str, Callable[[], Grammar | None]] = {
        "response_format": lambda: _from_format(common.response_format),
        "structured_outputs.json": lambda: _from_schema("structured_outputs.json", asked.json),
        "structured_outputs.json_object": lambda: _object() if asked.json_object else None,
        "structured_outputs.regex": lambda: _from_regex(asked.regex),
        "structured_outputs.choice": lambda: _from_choice(asked.choice),
        "structured_outputs.grammar": lambda: _from_lark(asked.grammar),
    }

    first = ""
    chosen = None
    for field, make in forms.items():
        option = make()
        if option is None:
            continue
        if chosen is not None:
            raise invalid_value(field, "set", f"only one of {first} and {field}")
        first = field
        chosen = option
    return chosen


def _from_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _object()
    if asked.type != "json_schema":
        raise invalid_value("response_format.type", asked.type, _TYPES)

    field = "response_format.json_schema"
    form = asked.json_schema
    if form is None:
        raise invalid_value(field, "missing", "an object with name and schema")
    if not _NAME.fullmatch(form.name):
        possible = "1 to 64 letters, digits, underscores and dashes"
        raise invalid_value(f"{field}.name", form.name, possible)

    schema = _from_schema(f"{field}.schema", form.schema)
    if schema is None:
        raise invalid_value(f"{field}.schema", "missing", "a JSON Schema")
    return schema


def _object() -> Grammar:
    return Grammar(json_object=inference_pb2.JsonObject())


def _from_schema(field: str, raw: msgspec.Raw) -> Grammar | None:
    """Return the grammar of a schema, given as JSON or as a string with JSON; None for null."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, f"{field} is not valid UTF-8; encode it as UTF-8") from error
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    if text == "null":
        return None

    if not _SCHEMA.match(text):
        raise invalid_value(field, text[:100], "a JSON Schema: an object, true or false")
    return Grammar(json_schema=text)


def _from_choice(texts: list[str] | None) -> Grammar | None:
    return None if texts is None else Grammar(choice=inference_pb2.Choice(texts=texts))


def _from_regex(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(regex=text)


def _from_lark(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(lark=text)
