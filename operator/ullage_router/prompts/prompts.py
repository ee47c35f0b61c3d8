"""From the input of a request, whatever its form, to the prompt that engines get."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.template import TURN_CHARACTERS, make_turns, read_arguments, weight
from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CleanseSection
from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import check_prompt_tokens
from ullage_router.engines.engines import Engines
from ullage_router.prompts.cleanse import cleanse_turns
from ullage_router.prompts.summarize import HistorySummarizer
from ullage_router.prompts.tool_use import ToolUse, tool_use
from ullage_router.prompts.truncate import droppable
from ullage_router.tokenizer import Model, PromptError, TokenizerThreads

TOKEN_BYTES = 44
CHARACTER_BYTES = 8
"""Bytes of one character of the turns, which the request has as well: at most 4 each."""
MAX_CHARACTERS_PER_TOKEN = 64
"""Sixteen times the usual: what a conversation may have for each token of the context."""


class Prompt(msgspec.Struct, frozen=True):
    """What is to be continued."""

    model: Model
    token_ids: list[int]
    turns: tuple[Turn, ...] = ()
    """Turns of the conversation; empty when it is not one."""
    degraded: tuple[str, ...] = ()
    """What was done to the conversation before anything was decided."""
    is_spent: bool = False
    """Shrinking it was tried."""
    tool_use: ToolUse = msgspec.field(default_factory=ToolUse)
    arguments: Mapping[str, Any] = msgspec.field(default_factory=dict)
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


class PromptBuilder:
    """Turns the input of requests into prompts: cleansed, summed up where it is long, tokenised.

    Args:
        section: what is taken out of conversations.
        summarizer: sums up long ones; None: they stay as they are.
        engines: where the longest context is known.
        threads: where long texts are tokenised.
        is_cascade: other models may answer as well, so that each takes what it knows.
    """

    def __init__(
        self,
        section: CleanseSection,
        summarizer: HistorySummarizer | None,
        engines: Engines,
        threads: TokenizerThreads,
        is_cascade: bool,
    ) -> None:
        self._is_cascade = is_cascade
        self._rules = section
        self._summarizer = summarizer
        self._engines = engines
        self._threads = threads

    async def build(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        path: Sequence[str] = (),
    ) -> Prompt:
        """Token ids of any input.

        Args:
            tenant: whose request it is.
            path: cascades that handed the request on to here.

        Raises:
            ServiceError: it has none, is far too long, or the chat template refuses it.
        """
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            ids = list(request.token_ids.ids)
            check_prompt_tokens(ids, model.vocab_size)
            return Prompt(model, ids)
        if kind == "text":
            self._check_size(model, request.text, "prompt")
            encode = model.encode_whole if request.embed else model.encode
            ids = await self._threads.run(len(request.text), lambda: encode(request.text))
            check_prompt_tokens(ids, model.vocab_size)
            return Prompt(model, ids)
        arguments = _arguments(
            model, request.messages.template_arguments, self._is_cascade or bool(path)
        )
        return await self._conversation(model, request, tenant, arguments)

    async def _conversation(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        arguments: Mapping[str, Any],
    ) -> Prompt:
        turns = tuple(make_turns(request.messages.messages))
        use = tool_use(request, model.tool_format)
        # The last turn stays whatever else is dropped.
        self._check_size(model, turns[-1]["content"], "messages")
        size = weight(turns) + use.num_characters + len(request.messages.template_arguments)
        self._check_whole(size)
        turns, degraded = await self._cleansed(turns, size)
        render = functools.partial(model.render, turns, use.tools, use.opening, arguments)
        try:
            ids = await self._threads.run(size, render)
        except PromptError as error:
            raise invalid("messages", f"messages: {error}") from error
        check_prompt_tokens(ids, model.vocab_size, "messages")
        prompt = Prompt(model, ids, turns, degraded, tool_use=use, arguments=arguments)
        return await self._summarized(prompt, tenant) if self._summarizer else prompt

    async def _summarized(self, prompt: Prompt, tenant: str) -> Prompt:
        assert self._summarizer
        history = await self._summarizer.summarize_history(
            prompt.turns,
            len(prompt.token_ids),
            self._engines.max_model_len,
            prompt.render,
            tenant,
        )
        if history is None:
            return prompt
        degraded = (*prompt.degraded, f"compressed_turns={history.num_turns}")
        return replace(prompt, token_ids=history.token_ids, turns=history.turns, degraded=degraded)

    async def _cleansed(
        self, turns: tuple[Turn, ...], size: int
    ) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
        """The turns as the service wants them, and what was done."""
        if not self._rules.is_any:
            return turns, ()
        cleansed, saved = await self._threads.run(size, lambda: cleanse_turns(turns, self._rules))
        return tuple(cleansed), (f"cleansed_chars={saved}",) if saved else ()

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
