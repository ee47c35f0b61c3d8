"""Chat templates: the Jinja dialect that Hugging Face models ship, rendered in a sandbox.

A template comes with a model, so it is code of a stranger: it can neither reach Python's internals
nor change what it is given.
"""

import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ullage_rpc.tool_formats import (
    Turn,
    described,
    for_format,
    tool_format,
    with_calls_as_text,
    with_tools_as_text,
)


class ChatTemplateError(Exception):
    """The template is broken, or refuses these messages; the message is one line."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source text.
        bos_token: text of the beginning-of-sequence token, empty when the model has none.
        eos_token: text of the end-of-sequence token, empty when the model has none.

    Raises:
        ChatTemplateError: the source is empty or not valid Jinja.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        if not source:
            raise ChatTemplateError("the model has no chat template; send text or token ids")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            # Copied for every prompt: a plain dictionary takes a third of Jinja's chain of them.
            self._template.globals = dict(self._template.globals)
            parsed = environment.parse(source)
            names = meta.find_undeclared_variables(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"chat template, line {error.lineno}: {error.message}"
            ) from error
        self.tool_format = tool_format(source)
        self._knows_tools = "tools" in names
        self._knows_calls = "tool_calls" in source
        self._given = {"bos_token": bos_token, "eos_token": eos_token, "documents": None}
        self.variables = frozenset(names - environment.globals.keys() - self._given.keys() - _OURS)
        """What the template reads that a client may set."""

    def render(
        self,
        messages: Sequence[Turn],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation; special tokens appear in it as text.

        A template that knows no tools, or no calls, is given them as words of the conversation.

        Args:
            messages: turns, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: functions that the model may call, as OpenAI has them.
            arguments: values of `variables`.

        Raises:
            ChatTemplateError: the template rejects the messages or fails on them.
        """
        messages = for_format(messages, self.tool_format)
        if not self._knows_calls:
            messages = with_calls_as_text(messages, self.tool_format)
        if not self._knows_tools:
            messages = with_tools_as_text(messages, tools)
        try:
            return self._template.render(
                **arguments,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                # Templates ask `tools is not none`, which an undefined variable is not either.
                tools=described(tools, self.tool_format) or None,
                **self._given,
            )
        except Exception as error:  # a stranger's code may raise anything
            raise ChatTemplateError(_one_line(f"chat template: {error}")) from error


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, which checks an attribute of a loop as long as one of anything else."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_LOOP_VALUES = frozenset({"first", "last", "index", "index0"})


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = time.strftime
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(text: str) -> str:
    return " ".join(text.split())
