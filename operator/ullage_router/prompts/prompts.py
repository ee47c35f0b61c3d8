"""Builds the prompt for the engines from a request's token ids, text or messages."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.template_arguments import read_arguments
from ullage_common.chat.tool_formats import ToolFormat, Turn
from ullage_common.chat.truncation import truncated
from ullage_common.chat.turns import TURN_CHARACTERS, make_turns, weight
from ullage_common.config.router import CleanseSection
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.validation import check_prompt_tokens
from ullage_router.engines.engines import Engines
from ullage_router.intake import IntakeThread
from ullage_router.policy.context_length import too_long
from ullage_router.prompts.cleanse import cleanse_turns, squeezed
from ullage_router.prompts.outline import are_more, written
from ullage_router.prompts.summarize import HistorySummarizer
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.prompts.tools.tool_use import ToolUse, tool_use
from ullage_router.prompts.truncate import droppable
from ullage_router.tokenizer.model import Model, PromptError
from ullage_router.tokenizer.segments import TokenIds, TooManyTokens

TOKEN_BYTES = 12
"""Estimated bytes of memory per token id."""
CHARACTER_BYTES = 8
"""Bytes of memory per character: at most 4 bytes in the turns and 4 in the request."""
MAX_CHARACTERS_PER_TOKEN = 64
"""Maximum input characters per token of context length. Typical text has a sixteenth of this."""
MAX_CONTEXTS = 16
"""Maximum length of a conversation with droppable turns, in multiples of the context length."""
PROMPT_END_TOKENS = 32
"""Tokens at a prompt's end that tell whether the template has begun the reasoning."""
COUNTED_CONTEXTS = 4
"""Multiple of the context length up to which an overlong text's tokens are counted.

The error message states the count.
"""
USUAL_CHARACTERS_PER_TOKEN = 8
"""Conversations with more characters per token of context are measured before rendering.

This is twice the usual number of characters per token.
"""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's tokens, and the conversation from which they were rendered."""

    model: Model
    token_ids: Sequence[int]
    turns: tuple[Turn, ...] = ()
    """Turns of the conversation. Empty for other inputs, or if turns are never dropped."""
    degraded: tuple[str, ...] = ()
    """Changes made to the conversation before admission, such as `cleansed_chars=12`."""
    is_spent: bool = False
    """Whether shrinking the prompt has been tried."""
    tool_use: ToolUse = msgspec.field(default_factory=ToolUse)
    arguments: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Variables for the chat template."""
    ignored: tuple[str, ...] = ()
    """Parts of the request that have no effect on this model, such as `reasoning_effort`."""
    end: inference_pb2.PromptEnd = inference_pb2.PROMPT_END_REPLY
    """How the prompt ends."""
    weight: int = 0
    """Number of characters of the original turns (`turns.weight`), even after shortening."""

    @property
    def memory_bytes(self) -> int:
        """Estimate of the most memory that the request takes up in this process, in bytes.

        This covers the prompt's tokens, the conversation's turns and the request itself.
        """
        return TOKEN_BYTES * len(self.token_ids) + CHARACTER_BYTES * self.weight

    def can_shrink(self, keep_turns: int) -> bool:
        """Return whether turns may be dropped to shorten the prompt. This is tried only once."""
        return not self.is_spent and bool(droppable(self.turns, keep_turns))

    def render(self, turns: Sequence[Turn]) -> Sequence[int]:
        """Render other turns to token ids, with this prompt's tools and template variables."""
        use = self.tool_use
        return self.model.render(turns, use.tools, use.opening, self.arguments, end=self.end)


class PromptBuilder:
    """Converts input to prompts: cleanses and tokenises it, and summarises long conversations.

    Args:
        section: the cleansing rules.
        summarizer: summarises long conversations. None leaves them unchanged.
        engines: the engines, which provide the maximum context length.
        threads: threads that tokenise long texts.
        intake: thread that converts conversations with many or long turns.
        drops_turns: whether turns of conversations that are too long may be dropped.
    """

    def __init__(
        self,
        section: CleanseSection,
        summarizer: HistorySummarizer | None,
        engines: Engines,
        threads: TokenizerThreads,
        intake: IntakeThread,
        drops_turns: bool = False,
    ) -> None:
        self._rules = section
        self._summarizer = summarizer
        self._engines = engines
        self._threads = threads
        self._intake = intake
        self._keeps_turns = drops_turns or summarizer is not None
        self._max_contexts = MAX_CONTEXTS if self._keeps_turns else COUNTED_CONTEXTS

    async def build(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        tenant: str,
    ) -> Prompt:
        """Build the prompt from the request's token ids, text or messages.

        Args:
            tenant: tenant of the request.

        Raises:
            ServiceError: the input is missing, far too long, or refused by the chat template.
        """
        kind = request.WhichOneof("input")
        context = self._engines.max_model_len
        if kind == "token_ids":
            if not request.truncate_prompt_tokens:
                self._check_count(len(request.token_ids.ids))
            ids = truncated(array("I", request.token_ids.ids), request, context, model.affixes)
            check_prompt_tokens(ids, model.vocab_size)
            return Prompt(model, ids)
        if kind == "text":
            return await self._text(model, request, tenant)
        return await self._conversation(model, request, tenant)

    async def _text(
        self, model: Model, request: inference_pb2.GenerateRequest, tenant: str
    ) -> Prompt:
        size = len(request.text)
        self._check_whole(size, "prompt")
        if request.embed:
            encode = model.encode_guarded if request.omit_special_tokens else model.encode_whole
        else:
            encode = model.encode_bare if request.omit_special_tokens else model.encode
        context = self._engines.max_model_len
        most = COUNTED_CONTEXTS * context
        longest = most if request.truncate_prompt_tokens else context

        def checked() -> "TokenIds | ServiceError":
            # Each access copies the text. Here the copy exists only while a thread works on it,
            # and no traceback keeps it alive, since errors are returned and not raised.
            text = request.text
            fewest = model.fewest_tokens(text)
            if fewest > longest:
                return self._too_long("prompt", fewest)
            try:
                return truncated(encode(text, most), request, context, model.affixes)
            except PromptError as error:
                return invalid("prompt", f"prompt: {error}")
            except ServiceError as error:
                return error.with_traceback(None)
            except TooManyTokens:
                return self._too_long("prompt", most)

        ids = await self._threads.run(size, checked, tenant)
        if isinstance(ids, ServiceError):
            try:
                raise ids
            finally:
                del ids  # breaks the reference cycle of the error, its traceback and this frame
        check_prompt_tokens(ids, model.vocab_size)
        return Prompt(model, ids)

    async def _conversation(
        self,
        model: Model,
        request: inference_pb2.GenerateRequest,
        tenant: str,
    ) -> Prompt:
        messages = request.messages
        end = messages.end
        arguments, ignored = _arguments(model, messages.template_arguments)
        num_bytes = request.messages.ByteSize() + TURN_CHARACTERS * len(request.messages.messages)
        read = functools.partial(self._read, model, request)
        keeps_turns = self._keeps_turns and not request.truncate_prompt_tokens
        turns, use, size = await self._intake.run(num_bytes, tenant, read)
        turns, degraded = await self._cleansed(turns, size, tenant)
        context = self._engines.max_model_len
        most = self._max_contexts * context

        def rendered() -> "TokenIds | ServiceError":
            # A returned error has no traceback, whose frames would keep every form of the text.
            try:
                if size > USUAL_CHARACTERS_PER_TOKEN * context:
                    stretches = written(model, turns, use, arguments, size)
                    if are_more(model, (stretch.content for stretch in stretches), most):
                        return self._too_long("messages", most)
                    # The last turn always stays, so it must fit. It may be cleansed first.
                    last = (
                        part for s in stretches if s.turn == len(turns) - 1 for part in s.parts()
                    )
                    if keeps_turns and are_more(model, map(squeezed, last), context):
                        return self._too_long("messages", context)
                ids = model.render(turns, use.tools, use.opening, arguments, most, end)
                return truncated(ids, request, context, model.affixes)
            except PromptError as error:
                return invalid("messages", f"messages: {error}")
            except TooManyTokens:
                return self._too_long("messages", most)

        ids = await self._threads.run(size, rendered, tenant)
        if isinstance(ids, ServiceError):
            try:
                raise ids
            finally:
                del ids  # breaks the reference cycle of the error, its traceback and this frame
        check_prompt_tokens(ids, model.vocab_size, "messages")
        if model.reasoning and not request.output.echo:
            last = model.decode(ids[-PROMPT_END_TOKENS:])
            use = use.with_reasoning(model.reasoning, last, model.is_special, model.mark_id)
        prompt = Prompt(
            model,
            ids,
            turns=turns if keeps_turns else (),
            degraded=degraded,
            tool_use=use,
            arguments=arguments,
            ignored=(*ignored, *(use.forced.ignored if use.forced else ())),
            end=end,
            weight=size,
        )
        return await self._summarized(prompt, tenant) if self._summarizer else prompt

    def _read(
        self, model: Model, request: inference_pb2.GenerateRequest
    ) -> tuple[tuple[Turn, ...], ToolUse, int]:
        """Convert the messages to turns, and refuse them if they are far too large.

        Returns:
            The turns, how the conversation uses tools, and the total number of characters.
        """
        messages = request.messages
        self._check_whole(_num_characters(messages))
        _check_calls(messages)
        turns = tuple(make_turns(messages.messages))
        use = tool_use(request, model.tool_format, model.is_special)
        if messages.end == inference_pb2.PROMPT_END_FINAL_MESSAGE:
            _check_continued(use, model.tool_format)
        size = weight(turns) + use.num_characters + len(messages.template_arguments)
        self._check_whole(size)
        return turns, use, size

    async def _summarized(self, prompt: Prompt, tenant: str) -> Prompt:
        assert self._summarizer
        history = await self._summarizer.summarize_history(
            prompt.turns,
            len(prompt.token_ids),
            self._engines.max_model_len,
            prompt.render,
            tenant,
            prompt.weight,
        )
        if history is None:
            return prompt
        degraded = (*prompt.degraded, f"compressed_turns={history.num_turns}")
        return replace(prompt, token_ids=history.token_ids, turns=history.turns, degraded=degraded)

    async def _cleansed(
        self, turns: tuple[Turn, ...], size: int, tenant: str
    ) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
        """Shorten the turns by the configured cleansing rules (`cleanse.py`).

        Returns:
            The shortened turns, and the change that is reported to the client, such as
            `cleansed_chars=120` (empty if no characters were saved).
        """
        if not self._rules.is_any:
            return turns, ()
        cleansed, saved = await self._threads.run(
            size, lambda: cleanse_turns(turns, self._rules), tenant
        )
        return tuple(cleansed), (f"cleansed_chars={saved}",) if saved else ()

    def _check_whole(self, size: int, field: str = "messages") -> None:
        """Refuse an input that is many times longer than the context and would be slow to tokenise.

        Each turn counts as TURN_CHARACTERS extra characters, since shortening many turns is slow.
        """
        most = self._engines.max_model_len * MAX_CHARACTERS_PER_TOKEN
        if size > most:
            counted = (
                f" ({TURN_CHARACTERS} counted for each message)" if field == "messages" else ""
            )
            characters = f"{field} has {size} characters{counted}"
            raise self._refusal(field, characters, f"send at most {most} characters")

    def _check_count(self, num_tokens: int) -> None:
        """Refuse a prompt with more tokens than any engine accepts, before copying the tokens."""
        if num_tokens > self._engines.max_model_len:
            raise self._refusal("prompt", f"it has {num_tokens} tokens", "shorten it")

    def _too_long(self, field: str, fewest: int) -> ServiceError:
        return self._refusal(field, f"{field} has more than {fewest} tokens", "shorten it")

    def _refusal(self, field: str, size: str, remedy: str) -> ServiceError:
        message = too_long("the prompt", size, self._engines.max_model_len, remedy)
        return invalid(field, message, "CONTEXT_TOO_LONG")


def _num_characters(messages: inference_pb2.Messages) -> int:
    """Return the number of characters in a conversation, plus TURN_CHARACTERS for each message."""
    size = TURN_CHARACTERS * len(messages.messages) + len(messages.template_arguments)
    for message in messages.messages:
        size += len(message.content) + len(message.reasoning)
        for call in message.tool_calls:
            size += len(call.name) + len(call.arguments)
    return size


def _check_calls(messages: inference_pb2.Messages) -> None:
    """Refuse tool calls whose arguments together have too many JSON values."""
    counter = JsonCounter("messages", VALUE_LIMITS, "messages: the arguments of all calls: JSON")
    for message in messages.messages:
        for call in message.tool_calls:
            counter.add(call.arguments.encode())


def _check_continued(use: ToolUse, form: ToolFormat) -> None:
    """Refuse to continue the last message where the answer would not be read as such."""
    field = "continue_final_message"
    if use.forced:
        raise invalid(field, f"{field} excludes a tool_choice that forces a call; leave out one")
    if form is ToolFormat.HARMONY:
        raise invalid(field, f"{field} is not supported in the model's format; leave it out")


def _arguments(model: Model, text: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Read the variables that the request passes to the chat template from their JSON text.

    Returns:
        The variables that the template reads, and the names of those that it does not. A model
        without a template has neither.
    """
    if not text or model.template is None:
        return {}, ()
    return read_arguments(text, model.template, "chat_template_kwargs")
