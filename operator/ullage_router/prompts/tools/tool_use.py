"""Adapts a conversation's tools to the model's prompt format, grammar and answer reader."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.reasoning_formats import ReasoningFormat
from ullage_common.chat.tool_formats import ToolFormat
from ullage_common.wire.errors import ServiceError, invalid
from ullage_router.prompts.tools.call_formats import CALL_FORMATS
from ullage_router.prompts.tools.call_syntax import parse_python_calls
from ullage_router.prompts.tools.forced_calls import Forced, force
from ullage_router.prompts.tools.harmony import HarmonyReader
from ullage_router.prompts.tools.pieces import Reader
from ullage_router.prompts.tools.readers import MarkedReader, TaggedReader, WholeReader
from ullage_router.prompts.tools.reasoning import PlainReader, ReasoningReader
from ullage_router.prompts.tools.toolbox import Toolbox, open_toolbox

# Formats whose marks are special tokens, which engines omit from text by default. Of other formats,
# the tokenizer says whether they are.
_SPECIAL = frozenset({ToolFormat.LFM2, ToolFormat.HARMONY})
IsSpecial = Callable[[str], bool]
"""Returns whether the tokenizer has a text as a special token."""
TokenId = Callable[[str], int | None]
"""Returns the id of a text that is an added token of the tokenizer, and None for other texts."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a conversation uses tools and reasoning. By default, answers are plain text."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that are passed to the chat template."""
    num_characters: int = 0
    """Total number of characters in the tools."""
    forced: Forced | None = None
    """The call that the model must make, if any."""
    new_reader: Callable[[], Reader] | None = None
    """Creates a reader for each answer, or None if answers are plain text."""
    special_tokens: bool = False
    """Whether the reader needs special tokens in the answer's text."""
    single_call: bool = False
    """Whether all calls after the first are dropped."""
    reasoning: ReasoningFormat | None = None
    """Marks of the reasoning with which answers may begin, or None if they have none."""
    reasoning_marks: inference_pb2.Reasoning = field(default_factory=inference_pb2.Reasoning)
    """The marks of the reasoning as engines take them."""

    def with_reasoning(
        self, form: ReasoningFormat, prompt_end: str, is_special: IsSpecial, token_id: TokenId
    ) -> "ToolUse":
        """Return the same use of tools for answers that may begin with reasoning.

        A forced call has no reasoning, and neither has an answer whose prompt closes it.

        Args:
            form: the model's reasoning format.
            prompt_end: the last characters of the prompt.
            is_special: says which marks are special tokens, which the answer's text then needs.
            token_id: returns the id of a mark that is an added token.
        """
        end = prompt_end.rstrip()
        if self.forced or end.endswith(form.end):
            return self
        is_open = end.endswith(form.begin)
        new_rest = self.new_reader or PlainReader
        marks = inference_pb2.Reasoning(
            begin="" if is_open else form.begin,
            end=form.end,
            begin_token_id=None if is_open else token_id(form.begin),
            end_token_id=token_id(form.end),
        )
        return replace(
            self,
            new_reader=lambda: ReasoningReader(form, is_open, new_rest()),
            special_tokens=self.special_tokens or any(map(is_special, form.marks)),
            reasoning=form,
            reasoning_marks=marks,
        )

    @property
    def opening(self) -> str:
        """Text that is appended to the rendered conversation."""
        return self.forced.opening if self.forced else ""

    def ask(self, request: inference_pb2.GenerateRequest) -> None:
        """Set the options of the engine's request that its tools require.

        These are the grammar that enforces a forced call, whether the answer's text includes
        special tokens for the reader, and the reasoning before which no other grammar holds.
        """
        if self.special_tokens and not request.output.special_tokens:
            request.output.special_tokens = True
            # The mark that ends a turn is no stop that the client asked for.
            request.output.omit_special_stop = request.output.include_stop
        if self.forced and self.forced.lark:
            request.grammar.lark = self.forced.lark
        elif self.forced:
            request.grammar.json_schema = self.forced.json_schema
        if self.reasoning and (request.HasField("grammar") or request.stop.stop_strings):
            request.reasoning.CopyFrom(self.reasoning_marks)

    def explain(self, error: ServiceError) -> ServiceError:
        """Make an error about a forced call's grammar refer to the request's tools.

        The grammar was generated from the tools, so the client does not know it. Other errors are
        returned unchanged.
        """
        if not self.forced or not error.metadata.get("field", "").startswith("grammar"):
            return error
        text = f"a forced function's parameters cannot be followed: {error.message}"
        return invalid("tools", f"tools: {text}")


def tool_use(
    request: inference_pb2.GenerateRequest, form: ToolFormat, is_special: IsSpecial
) -> ToolUse:
    """Decide how a conversation uses its tools, given the model's tool format.

    Args:
        is_special: says which marks are special tokens.

    Raises:
        ServiceError: the tools are invalid, or conflict with another option of the request.
    """
    tools = request.messages.tools
    toolbox = open_toolbox(tools) if request.messages.HasField("tools") else None
    if toolbox is None:
        return _without_tools(request, form)
    _check_alone(request)
    return _with_tools(toolbox, form, len(tools.functions), is_special)


def _without_tools(request: inference_pb2.GenerateRequest, form: ToolFormat) -> ToolUse:
    """Return the tool use of a conversation in which the model may not call tools.

    Only the harmony format needs a reader, because its answers always contain special tokens.
    """
    if form is not ToolFormat.HARMONY or request.output.echo:
        return ToolUse()
    return ToolUse(new_reader=lambda: HarmonyReader(()), special_tokens=True)


def _with_tools(
    toolbox: Toolbox, form: ToolFormat, num_characters: int, is_special: IsSpecial
) -> ToolUse:
    forced = force(toolbox, form) if toolbox.forced else None
    calls = CALL_FORMATS.get(form)
    marks = (calls.mark, *calls.others) if calls else ()
    return ToolUse(
        tools=toolbox.tools,
        num_characters=num_characters,
        forced=forced,
        new_reader=forced.reader if forced else lambda: _free_reader(form, toolbox.parameters),
        special_tokens=form in _SPECIAL or any(map(is_special, marks)),
        single_call=toolbox.single_call,
    )


def _free_reader(form: ToolFormat, functions: Mapping[str, Mapping[str, Any]]) -> Reader:
    if calls := CALL_FORMATS.get(form):
        return MarkedReader(calls, functions)
    match form:
        case ToolFormat.HARMONY:
            return HarmonyReader(functions)
        case ToolFormat.LFM2:
            tags = ("<|tool_call_start|>", "<|tool_call_end|>")
            return TaggedReader(tags, parse_python_calls, functions)
        case _:
            return WholeReader(functions)


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
