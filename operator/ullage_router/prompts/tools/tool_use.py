"""Adapts a conversation's tools to the model's prompt format, grammar and answer reader."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import ToolFormat
from ullage_common.wire.errors import ServiceError, invalid
from ullage_router.prompts.tools.call_syntax import parse_json_calls, parse_python_calls
from ullage_router.prompts.tools.forced_calls import Forced, force
from ullage_router.prompts.tools.harmony import HarmonyReader
from ullage_router.prompts.tools.pieces import Reader
from ullage_router.prompts.tools.readers import TaggedReader, WholeReader
from ullage_router.prompts.tools.toolbox import Toolbox, open_toolbox

# Formats whose marks are special tokens, which engines omit from text by default.
_SPECIAL = frozenset({ToolFormat.LFM2, ToolFormat.HARMONY})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a conversation uses tools. By default there are no tools, and answers are plain text."""

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

    @property
    def opening(self) -> str:
        """Text that is appended to the rendered conversation."""
        return self.forced.opening if self.forced else ""

    def ask(self, request: inference_pb2.GenerateRequest) -> None:
        """Set the options of the engine's request that its tools require.

        These are the grammar that enforces a forced call, and whether the answer's text includes
        special tokens for the reader.
        """
        request.output.special_tokens |= self.special_tokens
        if self.forced and self.forced.lark:
            request.grammar.lark = self.forced.lark
        elif self.forced:
            request.grammar.json_schema = self.forced.json_schema

    def explain(self, error: ServiceError) -> ServiceError:
        """Make an error about a forced call's grammar refer to the request's tools.

        The grammar was generated from the tools, so the client does not know it. Other errors are
        returned unchanged.
        """
        if not self.forced or not error.metadata.get("field", "").startswith("grammar"):
            return error
        text = f"a forced function's parameters cannot be followed: {error.message}"
        return invalid("tools", f"tools: {text}")


def tool_use(request: inference_pb2.GenerateRequest, form: ToolFormat) -> ToolUse:
    """Decide how a conversation uses its tools, given the model's tool format.

    Raises:
        ServiceError: the tools are invalid, or conflict with another option of the request.
    """
    tools = request.messages.tools
    toolbox = open_toolbox(tools) if request.messages.HasField("tools") else None
    if toolbox is None:
        return _without_tools(request, form)
    _check_alone(request)
    return _with_tools(toolbox, form, len(tools.functions))


def _without_tools(request: inference_pb2.GenerateRequest, form: ToolFormat) -> ToolUse:
    """Return the tool use of a conversation in which the model may not call tools.

    Only the harmony format needs a reader, because its answers always contain special tokens.
    """
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
