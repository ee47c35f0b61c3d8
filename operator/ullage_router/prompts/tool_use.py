"""Tools of a conversation with the model at hand: checks the functions, renders them into the
prompt, forces a call where one is required, and parses calls out of the engine's events.

A call is forced by a prompt that begins it in the model's own format and by a grammar for the rest.
With one function the prompt goes on to its arguments, and the grammar is their schema; with several
the answer begins with the choice of one. Nothing follows the arguments, so the answer ends there.
"""

import contextlib
import json
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import ToolFormat
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from ullage_common.wire.validation import invalid_value
from ullage_router.prompts.tool_parsers import (
    CallStart,
    ForcedReader,
    HarmonyReader,
    Piece,
    Reader,
    TaggedReader,
    Text,
    Thought,
    WholeReader,
    parse_json_calls,
    parse_python_calls,
)

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called."""

    tools: Sequence[Mapping[str, Any]]
    """Tools in OpenAI's form; chat templates are given them."""
    parameters: Mapping[str, Schema]
    """JSON schema of the arguments by function; each is of an object."""
    forced: Sequence[str]
    """Functions one of which must be called; empty: none must."""
    single_call: bool


def open_toolbox(tools: inference_pb2.Tools) -> Toolbox | None:
    """The functions that the model may know of; None where there are none.

    Raises:
        ServiceError: a field is wrong.
    """
    listed = _parse(tools.functions)
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(listed)]
    parameters = {function["name"]: _parameters(function) for function in functions}
    if len(parameters) < len(functions):
        raise invalid("tools", "tools has two functions of one name; give each its own")
    forced = _forced(tools, list(parameters))
    if tools.mode == inference_pb2.TOOL_MODE_NONE:
        return None
    return Toolbox(listed, parameters, forced, tools.single_call or bool(forced))


def _parse(text: str) -> list[Any]:
    size = len(text.encode())
    if size > MAX_TOOLS_BYTES:
        raise invalid_value("tools", f"{size} bytes", f"at most {MAX_TOOLS_BYTES} bytes")
    JsonCounter("tools", VALUE_LIMITS).add(text.encode())
    try:
        listed = json.loads(text)
        json.dumps(listed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        message = "tools is not JSON, nested too deeply, or has unpaired surrogates; send a list"
        raise invalid("tools", message) from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TOOLS:
        raise invalid("tools", f"tools must be a list of 1 to {MAX_TOOLS} tools")
    return listed


def _function(field: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid_value(field, json.dumps(tool), "an object")
    if tool.get("type") != "function":
        raise invalid_value(f"{field}.type", json.dumps(tool.get("type")), '"function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid_value(f"{field}.function", json.dumps(function), "an object")
    name = function.get("name")
    shape = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        possible = "1 to 64 of letters, digits, underscore, dot and hyphen"
        raise invalid_value(f"{field}.function.name", json.dumps(name), possible)
    if shape is not None and not isinstance(shape, dict):
        raise invalid_value(f"{field}.function.parameters", json.dumps(shape), "a JSON schema")
    if isinstance(shape, dict) and shape.get("type", "object") != "object":
        possible = '"object"'
        raise invalid_value(
            f"{field}.function.parameters.type", json.dumps(shape["type"]), possible
        )
    return function


def _parameters(function: Mapping[str, Any]) -> Schema:
    """No schema means no parameters, as OpenAI has it."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def _forced(tools: inference_pb2.Tools, names: list[str]) -> list[str]:
    if tools.mode == inference_pb2.TOOL_MODE_REQUIRED:
        return names
    if tools.mode != inference_pb2.TOOL_MODE_NAMED:
        return []
    if tools.name not in names:
        raise invalid_value("tool_choice.function.name", tools.name or '""', ", ".join(names))
    return [tools.name]


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
_HARMONY_MARKS = ("<|constrain|>", "<|message|>")
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
    """Force a call of one of `toolbox.forced`."""
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
    for mark in _HARMONY_MARKS:
        text = text.replace(mark, f"\0{mark}\0")
    parts = [part for part in text.split("\0") if part]
    return " ".join(part if part in _HARMONY_MARKS else json.dumps(part) for part in parts)


# Formats whose marks are special tokens, which engines leave out of text unless asked.
_SPECIAL = frozenset({ToolFormat.LFM2, ToolFormat.HARMONY})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a conversation needs beside its turns. The default is what text needs: nothing."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Told to the model by its chat template."""
    num_characters: int = 0
    """Number of characters of the tools."""
    forced: Forced | None = None
    new_reader: Callable[[], Reader] | None = None
    """Reads the answer; None: all of it is text."""
    special_tokens: bool = False
    """The reader needs them in the text."""
    single_call: bool = False
    """Calls after the first are left out."""

    @property
    def opening(self) -> str:
        """Follows the rendered conversation."""
        return self.forced.opening if self.forced else ""

    def ask(self, request: inference_pb2.GenerateRequest) -> None:
        """Write what an engine must know into its request."""
        request.output.special_tokens = self.special_tokens
        if self.forced and self.forced.lark:
            request.grammar.lark = self.forced.lark
        elif self.forced:
            request.grammar.json_schema = self.forced.json_schema

    def explain(self, error: ServiceError) -> ServiceError:
        """An engine's refusal in the words of the request: the grammar is made from its tools."""
        if not self.forced or not error.metadata.get("field", "").startswith("grammar"):
            return error
        text = f"a forced function's parameters cannot be followed: {error.message}"
        return invalid("tools", f"tools: {text}")


def tool_use(request: inference_pb2.GenerateRequest, form: ToolFormat) -> ToolUse:
    """Return how the tools of a conversation are used.

    Raises:
        ServiceError: they are wrong, or go with nothing else that is asked.
    """
    tools = request.messages.tools
    toolbox = open_toolbox(tools) if request.messages.HasField("tools") else None
    if toolbox is None:
        return _without_tools(request, form)
    _check_alone(request)
    return _with_tools(toolbox, form, len(tools.functions))


def _without_tools(request: inference_pb2.GenerateRequest, form: ToolFormat) -> ToolUse:
    """The harmony format has marks in answers without tools too."""
    if form is not ToolFormat.HARMONY or request.output.echo:
        return ToolUse()
    return ToolUse(new_reader=lambda: HarmonyReader(()), special_tokens=True)


def _with_tools(toolbox: Toolbox, form: ToolFormat, num_characters: int) -> ToolUse:
    forced = force(toolbox, form) if toolbox.forced else None
    return ToolUse(
        tools=toolbox.tools,
        num_characters=num_characters,
        forced=forced,
        new_reader=forced.reader if forced else lambda: _free_reader(form, toolbox.parameters),
        special_tokens=form in _SPECIAL,
        single_call=toolbox.single_call,
    )


def _free_reader(form: ToolFormat, names: Mapping[str, Any]) -> Reader:
    match form:
        case ToolFormat.HARMONY:
            return HarmonyReader(names)
        case ToolFormat.HERMES:
            return TaggedReader(("<tool_call>", "</tool_call>"), parse_json_calls, names)
        case ToolFormat.LFM2:
            tags = ("<|tool_call_start|>", "<|tool_call_end|>")
            return TaggedReader(tags, parse_python_calls, names)
        case _:
            return WholeReader(names)


def _check_alone(request: inference_pb2.GenerateRequest) -> None:
    if request.output.echo:
        raise invalid("echo", "echo is true; possible: false together with tools")
    mode = request.messages.tools.mode
    if mode not in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
        return
    excluded = {
        "response_format or another grammar": request.HasField("grammar"),
        "ignore_eos": request.stop.ignore_eos,
        "beam search": request.samples.HasField("beam"),
    }
    for name, is_given in excluded.items():
        if is_given:
            text = f"tool_choice forces a call, which excludes {name}; leave out one of them"
            raise invalid("tool_choice", text)


Event = inference_pb2.GenerateResponse
Delta = inference_pb2.Delta
Finished = inference_pb2.Finished | inference_pb2.SampleFinished


async def read_calls(
    events: AsyncGenerator[Event, None], use: ToolUse, num_samples: int
) -> AsyncGenerator[Event, None]:
    """The events with calls and thoughts beside the text.

    Args:
        events: Delta and SampleFinished any number of times, then Finished.
        use: how the answers are read.
        num_samples: answers there are.
    """
    answers = [_Answer(use, sample) for sample in range(num_samples)]
    async with contextlib.aclosing(events):
        async for event in events:
            for visible in _visible(event, answers):
                yield visible


def _visible(event: Event, answers: list["_Answer"]) -> Iterator[Event]:
    match event.WhichOneof("event"):
        case "delta":
            answers[event.delta.sample].read(event.delta)
        case "sample_finished":
            yield from answers[event.sample_finished.sample].end(event.sample_finished)
        case "finished":
            for answer in answers:
                yield from answer.end(event.finished)
    yield event


class _Answer:
    """One answer's parser and the calls that it has made."""

    def __init__(self, use: ToolUse, sample: int) -> None:
        assert use.new_reader, "text alone needs no reading"
        self._reader: Reader = use.new_reader()
        self._single_call = use.single_call
        self._sample = sample
        self._num_calls = 0
        self._is_over = False

    def read(self, delta: Delta) -> None:
        """Replace the delta's text by what it means."""
        pieces = self._reader.push(delta.text)
        delta.text = ""
        self._fill(delta, pieces)

    def end(self, finished: Finished) -> Iterator[Event]:
        """What was held back; and the reason is calls, where there are such."""
        if not self._is_over:
            self._is_over = True
            last = Delta(sample=self._sample)
            self._fill(last, self._reader.close())
            if last.text or last.reasoning or last.tool_calls:
                yield Event(delta=last)
        if self._num_calls and finished.reason == inference_pb2.FINISH_REASON_STOP:
            finished.reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _fill(self, delta: Delta, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                delta.text += piece.text
            elif isinstance(piece, Thought):
                delta.reasoning += piece.text
            else:
                self._fill_call(delta, piece)

    def _fill_call(self, delta: Delta, piece: Piece) -> None:
        self._num_calls += isinstance(piece, CallStart)
        if self._single_call and self._num_calls > 1:
            return
        index = self._num_calls - 1
        if isinstance(piece, CallStart):
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            delta.tool_calls.add(index=index, id=call_id, name=piece.name)
        elif delta.tool_calls and delta.tool_calls[-1].index == index:
            delta.tool_calls[-1].arguments += piece.text
        else:
            delta.tool_calls.add(index=index, arguments=piece.text)
