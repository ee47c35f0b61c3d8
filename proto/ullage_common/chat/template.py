"""Renders conversations with chat templates in the Jinja dialect of Hugging Face models.

A template comes with a model, so it is untrusted code. The sandbox prevents it from reaching
Python's internals and from changing its arguments. A client may set only variables that the
template reads.
"""

import contextlib
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ullage_common.chat.client_text import ascii_json, escaped, formatted, interposed, joined
from ullage_common.chat.template_looks import Looks, looks_of
from ullage_common.chat.tool_formats import (
    ToolFormat,
    Turn,
    described,
    for_format,
    tool_format,
    with_arguments_as_text,
    with_calls_as_text,
    with_numbered_ids,
    with_results_as_text,
    with_short_ids,
    with_tools_as_text,
)

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of special tokens that any model may have."""

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS})
_LOOP_VALUES = frozenset({"first", "last", "index", "index0"})

_CHECKS_IDS = re.compile(r"length\s*[!=<>]=?\s*9\b")
"""Matches the check in Mistral's templates that tool call ids have nine characters."""

_WORD = "x"
_CALL = {"id": "a" * 9, "type": "function", "function": {"name": _WORD, "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": _WORD, "description": _WORD, "parameters": {}}}
_SYSTEM: Turn = {"role": "system", "content": _WORD}
_USER: Turn = {"role": "user", "content": _WORD}
_ASSISTANT: Turn = {"role": "assistant", "content": _WORD}
_CALLING: Turn = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Turn = {"role": "tool", "content": _WORD, "name": _WORD, "tool_call_id": "a" * 9}
_TALKS: Sequence[tuple[Sequence[Turn], Sequence[Mapping[str, Any]]]] = (
    ([_SYSTEM, _USER], ()),
    ([_USER, _ASSISTANT, _USER], ()),
    ([_USER, _CALLING, _RESULT], [_TOOL]),
)
"""Sample conversations, each with its tools."""


class ChatTemplateError(Exception):
    """Raised if the template is broken or rejects the messages. The error text is one line."""


class ChatTemplate:
    """The compiled chat template of a model.

    Args:
        source: Jinja source text.
        special_tokens: texts of the model's special tokens by the names that templates use. Tokens
            that the model lacks are absent here and undefined in the template.
        tool_source: template source for conversations with tools (empty to use `source` for these).

    Raises:
        ChatTemplateError: the source is empty or not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        tool_source: str = "",
    ) -> None:
        if not source:
            raise ChatTemplateError("the model has no chat template; send text or token ids")
        environment = _environment()
        self._plain = _compiled(environment, source)
        self._with_tools = _compiled(environment, tool_source) if tool_source else self._plain
        self.tool_format = tool_format(tool_source or source)

        self.source = source
        """Source text of the template for conversations without tools."""

        self._given = {**special_tokens, "documents": None}
        self._wants_text_arguments = False
        self._wants_text_arguments = self._refuses_objects()
        names = self._plain.names | self._with_tools.names
        self.variables = names - environment.globals.keys() - self._given.keys() - _OURS
        """Names of the variables that the template reads and that a client may set."""

        self.looks = self._plain.looks | self._with_tools.looks
        """How the template inspects the text of messages."""

        self.literals = (
            self._plain.literals
            | self._with_tools.literals
            | {*special_tokens.values()}
            | {*self._samples()}
        )
        """Texts that the template writes or searches for, and prompts of sample conversations."""

    def render(
        self,
        messages: Sequence[Turn],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
    ) -> str:
        """Render the prompt text of a conversation, with special tokens as text.

        If the template does not support tools or tool calls, they are rendered as text in messages.

        Args:
            messages: turns, oldest first.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            tools: functions that the model may call, in OpenAI's form.
            arguments: values that the client sets for names in `variables`.
            continue_final_message: whether the prompt ends with the text of the last message, so
                that the model continues it. Excludes `add_generation_prompt`.

        Raises:
            ChatTemplateError: the template rejects the messages, fails on them, or does not render
                the text of a last message that is to be continued.
        """
        mark = f"{secrets.token_hex(16)} " if continue_final_message else ""
        if mark:
            messages = _marked_end(messages, mark)
        compiled = self._with_tools if tools else self._plain
        messages = for_format(messages, self.tool_format)
        if self.tool_format is ToolFormat.KIMI:
            messages = with_numbered_ids(messages)
        if self._wants_text_arguments:
            messages = with_arguments_as_text(messages)

        if not compiled.knows_calls:
            messages = with_calls_as_text(messages, self.tool_format)
        elif compiled.checks_ids:
            messages = with_short_ids(messages)

        if not compiled.knows_tools:
            messages = with_tools_as_text(messages, tools)
            # A template that writes calls also writes their results.
            if not compiled.knows_calls:
                messages = with_results_as_text(messages)

        try:
            text = compiled.render(
                **arguments,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                # None and not undefined, because templates ask `tools is not none`.
                tools=described(tools, self.tool_format) or None,
                **self._given,
            )
            text = str.__str__(text)  # a plain string, even if it is ClientText
        except Exception as error:  # untrusted code may raise anything
            raise ChatTemplateError(_one_line(f"chat template: {error}")) from error
        return _cut_at(text, mark) if mark else text

    def _refuses_objects(self) -> bool:
        """Return whether the template takes the arguments of calls only as JSON text."""
        as_objects = [_USER, _CALLING, _RESULT]
        as_texts = with_arguments_as_text(as_objects)
        return not self._accepts(as_objects) and self._accepts(as_texts)

    def _accepts(self, turns: Sequence[Turn]) -> bool:
        with contextlib.suppress(ChatTemplateError):
            self.render(turns, tools=[_TOOL])
            return True
        return False

    def _samples(self) -> Iterator[str]:
        """Yield the prompts of short sample conversations.

        These prompts reveal texts that the template assembles from parts, such as `'<|' + role +
        '|>'`.
        """
        for turns, tools in _TALKS:
            with contextlib.suppress(ChatTemplateError):  # it may refuse an order of roles
                yield self.render(turns, tools=tools)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled template, with properties derived from its source."""

    render: Callable[..., str]
    names: frozenset[str]
    """Variables that the template reads."""
    literals: frozenset[str]
    """Text constants in the template's source."""
    knows_calls: bool
    """Whether the template renders tool calls."""
    checks_ids: bool
    """Whether the template checks that tool call ids have nine characters."""
    looks: Looks

    @property
    def knows_tools(self) -> bool:
        """Whether the template renders tool definitions."""
        return "tools" in self.names


def _compiled(environment: jinja2.Environment, source: str) -> _Compiled:
    try:
        template = environment.from_string(source)
        parsed = environment.parse(source)
        names = meta.find_undeclared_variables(parsed)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError) as error:  # of the Python that Jinja makes of it
        raise ChatTemplateError(_one_line(f"chat template: {error}")) from error

    # Copied for every prompt: a plain dictionary takes a third of the time of Jinja's ChainMap.
    template.globals = dict(template.globals)
    return _Compiled(
        render=template.render,
        names=frozenset(names),
        literals=frozenset(_literals(parsed)),
        knows_calls="tool_calls" in source,
        checks_ids=_CHECKS_IDS.search(source) is not None,
        looks=looks_of(parsed),
    )


def _literals(parsed: nodes.Template) -> Iterator[str]:
    for data in parsed.find_all(nodes.TemplateData):
        yield data.data
    for constant in parsed.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training.

    The body becomes a call block, as in transformers, so it has a separate variable scope.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Generator(CodeGenerator):
    """Code generator that compiles Jinja's operator `~` to a call of the environment's `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, extended so that joined client text remains `ClientText`.

    For speed, some attributes of the `loop` variable skip the sandbox's checks.
    """

    code_generator_class = _Generator
    concat = staticmethod(joined)
    intercepted_binops = frozenset("%")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            return formatted(left, right)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute == "join" and type(obj) is str:
            return functools.partial(interposed, obj)
        if type(obj) is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Dictionaries:
    """A stand-in for `dict` in templates, which hides the attributes of Python's own type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A Jinja namespace that rejects names with a leading underscore.

    Such names would give access to Python's internals.
    """

    # No parameter has a name, since `namespace(self=...)` is valid.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no underscored name such as {name!r}; rename it")


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.filters["escape"] = environment.filters["e"] = escaped
    # striptags turns entities into characters, which would then count as the template's own.
    del environment.filters["striptags"]
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dictionaries()
    environment.globals["namespace"] = _Namespace
    return environment


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return interposed(d, value)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Render plain JSON. Jinja's own filter escapes HTML, and no model was trained on that."""
    dump = functools.partial(
        json.dumps,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return ascii_json(value, dump) if ensure_ascii else dump(value)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _marked_end(messages: Sequence[Turn], mark: str) -> list[Turn]:
    """Return the conversation with a mark at the end of the last message's text.

    Raises:
        ChatTemplateError: the last message has no text that could be continued.
    """
    *earlier, last = messages
    if not last["content"] or "tool_calls" in last:
        raise ChatTemplateError(
            "the last message has no text, or it has calls, so it cannot be continued; leave out "
            "continue_final_message"
        )
    return [*earlier, {**last, "content": last["content"] + mark}]


def _cut_at(prompt: str, mark: str) -> str:
    """Return the prompt before the mark.

    The mark ends with a space. If the template has stripped that, it strips texts, and the text
    before the mark loses its trailing white space, too.

    Raises:
        ChatTemplateError: the prompt does not contain the mark.
    """
    start = prompt.rfind(mark.strip())
    if start < 0:
        raise ChatTemplateError(
            "the chat template leaves out the last message's text; leave out continue_final_message"
        )
    text = prompt[:start]
    return text if prompt.startswith(mark, start) else text.rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
