"""From the input of a request, whatever its form, to the prompt that engines get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_router import validate
from ullage_router.cleanse import Rules, cleanse_turns
from ullage_router.compress import droppable
from ullage_router.condense import UNPAID, Condenser
from ullage_router.config import CleanseSection
from ullage_router.engines import Engines
from ullage_router.tenants import Errands
from ullage_router.tokenize import Model, PromptError, TokenizerThreads
from ullage_router.tools.use import ToolUse, tool_use
from ullage_rpc.errors import invalid
from ullage_rpc.template_arguments import read_arguments
from ullage_rpc.tool_formats import Turn
from ullage_rpc.turns import TURN_CHARACTERS, make_turns, weight

TOKEN_BYTES = 44
CHARACTER_BYTES = 8
"""Of turns, which the request has as well: at most 4 bytes each."""
MAX_CHARACTERS_PER_TOKEN = 64
"""Sixteen times the usual: what a conversation may have for each token of the context."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued."""

    model: Model
    token_ids: list[int]
    turns: tuple[Turn, ...] = ()
    """Turns of the conversation; empty when it is not one."""
    degraded: tuple[str, ...] = ()
    """What was done to the conversation before anything was decided."""
    is_spent: bool = False
    """Shrinking it was tried."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""

    @property
    def memory_bytes(self) -> int:
        """About what this process keeps for it, from above: tokens, turns and the request."""
        return TOKEN_BYTES * len(self.token_ids) + CHARACTER_BYTES * weight(self.turns)

    def can_shrink(self, keep_turns: int) -> bool:
        """Turns other than the newest may be dropped, and that was not tried before."""
        return not self.is_spent and bool(droppable(self.turns, keep_turns))

    def render(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of another conversation with the same tools and variables."""
        use = self.tool_use
        return self.model.render(turns, use.tools, use.opening, self.arguments)


class Prompts:
    """Tokenises requests.

    Args:
        section: what is taken out of conversations.
        condenser: sums up long ones.
        engines: tell the longest context.
        threads: where long texts are tokenised.
        is_cascade: other models may answer as well, so that each takes what it knows.
    """

    def __init__(
        self,
        section: CleanseSection,
        condenser: Condenser,
        engines: Engines,
        threads: TokenizerThreads,
        is_cascade: bool,
    ) -> None:
        self._is_cascade = is_cascade
        self._rules = Rules(section.whitespace, section.zero_width, section.html)
        self._condenser = condenser
        self._engines = engines
        self._threads = threads

    async def make(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        errands: Errands,
        path: Sequence[str] = (),
    ) -> Prompt:
        """Token ids of any input.

        Args:
            errands: pay for what a model writes to shorten it.
            path: cascades that handed the request on to here.

        Raises:
            ServiceError: it has none, is far too long, or the chat template refuses it.
        """
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            ids = list(request.token_ids.ids)
            validate.check_tokens(ids, model.vocab_size)
            return Prompt(model, ids)
        if kind == "text":
            self._check_size(model, request.text, "prompt")
            ids = await self._threads.run(len(request.text), lambda: model.encode(request.text))
            validate.check_tokens(ids, model.vocab_size)
            return Prompt(model, ids)
        arguments = _arguments(
            model, request.messages.template_arguments, self._is_cascade or bool(path)
        )
        return await self._conversation(model, request, errands, arguments)

    async def _conversation(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        errands: Errands,
        arguments: Mapping[str, Any],
    ) -> Prompt:
        turns = tuple(make_turns(request.messages.messages))
        use = tool_use(request, model.tool_format)
        # The last turn stays whatever else is dropped.
        self._check_size(model, turns[-1]["content"], "messages")
        size = weight(turns) + use.num_characters + len(request.messages.template_arguments)
        self._check_whole(size)
        turns, degraded = await self._cleansed(turns, size)
        prompt = Prompt(model, [], turns, degraded, tool_use=use, arguments=arguments)
        try:
            ids = await self._threads.run(size, lambda: prompt.render(turns))
        except PromptError as error:
            raise invalid("messages", f"messages: {error}") from error
        validate.check_tokens(ids, model.vocab_size, "messages")
        prompt = replace(prompt, token_ids=ids)
        context = self._engines.max_model_len
        if made := await self._condenser.condense(turns, len(ids), context, prompt.render, errands):
            degraded += (f"compressed_turns={made.num_turns}",)
            degraded += ("summary=extractive",) if made.method == UNPAID else ()
            return replace(prompt, token_ids=made.token_ids, turns=made.turns, degraded=degraded)
        return prompt

    async def _cleansed(
        self, turns: tuple[Turn, ...], size: int
    ) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
        """The turns as the service wants them, and what was done."""
        if not self._rules.is_any:
            return turns, ()
        made, saved = await self._threads.run(size, lambda: cleanse_turns(turns, self._rules))
        return tuple(made), (f"cleansed_chars={saved}",) if saved else ()

    def _check_whole(self, size: int) -> None:
        """Refuses a conversation many times the context, or of more turns than it has tokens:
        finding what to drop would take long."""
        most = self._engines.max_model_len * MAX_CHARACTERS_PER_TOKEN
        if size > most:
            message = (
                f"messages have {size} characters, {TURN_CHARACTERS} counted for each message, and "
                f"the context is {self._engines.max_model_len} tokens; send at most {most}"
            )
            raise invalid("messages", message, "CONTEXT_TOO_LONG")

    def _check_size(self, model: Model, text: str, field: str) -> None:
        """Refuses a text that cannot fit however its tokens fall: tokenising megabytes is slow."""
        fewest, context = model.fewest_tokens(text), self._engines.max_model_len
        if fewest > context:
            message = (
                f"{field} has more than {fewest} tokens and the context is {context} tokens; "
                "shorten it"
            )
            raise invalid(field, message, "CONTEXT_TOO_LONG")


def _arguments(model: Model, text: str, is_cascade: bool) -> Mapping[str, Any]:
    """Variables for the chat template; without one rendering is refused anyway."""
    if not text or model.template is None:
        return {}
    return read_arguments(text, model.template, "chat_template_kwargs", is_cascade)
