"""What an OpenAI body says of the answer's form: biases of tokens, and a grammar."""

import re
from collections.abc import Callable
from operator import attrgetter

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.schemas import MAX_UINT32, Common, ResponseFormat, StructuredOutputs
from ullage_router.validate import wrong
from ullage_rpc.errors import invalid

Grammar = inference_pb2.Grammar

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = "text, json_object, json_schema"


_grammars = attrgetter(
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_NO_GRAMMAR = _grammars(Common())
_MAX_TOKEN_DIGITS = len(str(MAX_UINT32))


def logit_bias(common: Common) -> dict[int, float]:
    """By token; raises ServiceError for a key that is no token."""
    found = {}
    for key, value in (common.logit_bias or {}).items():
        if not _is_token(key):
            raise wrong(f"logit_bias[{key[:20]!r}]", value, "keys that are token ids")
        found[int(key)] = value
    return found


def _is_token(key: str) -> bool:
    is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS
    return is_number and int(key) <= MAX_UINT32


def grammar(common: Common) -> Grammar | None:
    """The grammar that the body asks for; None: any text.

    Raises:
        ServiceError: it is incomplete, or there are two.
    """
    if _grammars(common) == _NO_GRAMMAR:
        return None
    asked = common.structured_outputs or StructuredOutputs()
    wanted: dict[str, Callable[[], Grammar | None]] = {
        "response_format": lambda: _from_format(common.response_format),
        "structured_outputs.json": lambda: _from_schema("structured_outputs.json", asked.json),
        "structured_outputs.json_object": lambda: _object() if asked.json_object else None,
        "structured_outputs.regex": lambda: _from_regex(asked.regex),
        "structured_outputs.choice": lambda: _from_choice(asked.choice),
        "structured_outputs.grammar": lambda: _from_lark(asked.grammar),
        "guided_json": lambda: _from_schema("guided_json", common.guided_json),
        "guided_regex": lambda: _from_regex(common.guided_regex),
        "guided_choice": lambda: _from_choice(common.guided_choice),
        "guided_grammar": lambda: _from_lark(common.guided_grammar),
    }
    first, found = "", None
    for field, make in wanted.items():
        made = make()
        if made is None:
            continue
        if found is not None:
            raise wrong(field, "set", f"only one of {first} and {field}")
        first, found = field, made
    return found


def _from_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _object()
    if asked.type != "json_schema":
        raise wrong("response_format.type", asked.type, _TYPES)
    field, form = "response_format.json_schema", asked.json_schema
    if form is None:
        raise wrong(field, "missing", "an object with name and schema")
    if not _NAME.fullmatch(form.name):
        wanted = "1 to 64 letters, digits, underscores and dashes"
        raise wrong(f"{field}.name", form.name, wanted)
    schema = _from_schema(f"{field}.schema", form.schema)
    if schema is None:
        raise wrong(f"{field}.schema", "missing", "a JSON Schema")
    return schema


def _object() -> Grammar:
    return Grammar(json_object=inference_pb2.JsonObject())


def _from_schema(field: str, raw: msgspec.Raw) -> Grammar | None:
    """A schema as it stands in the body, or in a string there; None for null."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, f"{field} is not valid UTF-8; encode it as UTF-8") from error
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return None if text == "null" else Grammar(json_schema=text)


def _from_choice(texts: list[str] | None) -> Grammar | None:
    return None if texts is None else Grammar(choice=inference_pb2.Choice(texts=texts))


def _from_regex(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(regex=text)


def _from_lark(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(lark=text)
