"""The parts of the served model that the router uses: tokenizer, chat template, special tokens.

Engines publish the tokenizer, and the router tokenises each request's text only once.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.affixes import Affixes, affixes_of
from ullage_common.chat.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format,
)
from ullage_common.chat.special_tokens import ClearMarks, SpecialTokenGuard
from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.chat.token_finder import SpecialTokenError, TokenPiece
from ullage_common.chat.tool_formats import ToolFormat, Turn
from ullage_common.chat.turns import ending
from ullage_common.process.memory import freeze_gc, trim_heap
from ullage_router.text_bounds import TokenBound, UncutText, token_bound
from ullage_router.tokenizer.segments import EDGE_TOKENS, MAX_TOKENS, SegmentEncoder, TokenIds


class PromptError(Exception):
    """Raised when a prompt cannot be tokenised. The message is a single line."""


@dataclass(frozen=True, slots=True)
class Model:
    """The parts of the served model that the router needs to tokenise prompts."""

    name: str
    fingerprint: str
    """Digest of the model's task and of everything else that affects its token ids."""
    tokenizer: Tokenizer
    encoder: SegmentEncoder
    template: ChatTemplate | None
    affixes: Affixes
    """Special tokens that are added before and after raw prompts."""
    chat_prefix: tuple[int, ...]
    """Tokens with which every conversation starts, even if the chat template omits them."""
    vocab_size: int
    bound: TokenBound
    """Computes a lower bound on the number of tokens in a text."""
    guard: SpecialTokenGuard | None
    """Keeps client text from being encoded as special tokens, or None if that is allowed."""
    description: inference_pb2.GetModelResponse
    reasoning: ReasoningFormat | None = None
    """Marks around the reasoning of answers, or None if reasoning stays text."""
    added_tokens: Mapping[str, AddedToken] = field(default_factory=dict)
    """Special and other tokens that were added to the tokenizer's vocabulary, by text."""

    def is_special(self, text: str) -> bool:
        """Return whether the tokenizer has a text as a special token."""
        added = self.added_tokens.get(text)
        return added is not None and added.special

    def mark_id(self, text: str) -> int | None:
        """Return the id of a text that grammars know as one token and not as characters.

        These are special tokens, and added tokens in angle brackets.
        """
        added = self.added_tokens.get(text)
        is_tag = text.startswith("<") and text.endswith(">")
        is_token = added is not None and (added.special or is_tag)
        return self.tokenizer.token_to_id(text) if is_token else None

    @property
    def tool_format(self) -> ToolFormat:
        """Return the format in which the model writes tool calls."""
        return self.template.tool_format if self.template else ToolFormat.PLAIN

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
        most: int = MAX_TOKENS,
        end: inference_pb2.PromptEnd = inference_pb2.PROMPT_END_REPLY,
    ) -> TokenIds:
        """Render a conversation with the chat template, and return its token ids.

        Args:
            messages: turns of the conversation, oldest first.
            tools: functions that the model may call, in OpenAI's format.
            opening: text with which the assistant's turn starts.
            arguments: additional variables for the template.
            most: maximum number of tokens, beyond which tokenisation is stopped.
            end: how the prompt ends.

        Raises:
            PromptError: the model has no chat template, its template rejects the messages, or the
                conversation cannot be tokenised.
            TooManyTokens: the conversation has more than `most` tokens.
        """
        try:
            text, marks = self._written(messages, tools, arguments, end)
            opening = self._after_reasoning(text, opening)
            if marks is None:
                ids = self.encoder.encode(text + opening, most)
            else:
                ids = self.encoder.encode_pieces(marks.pieces(text + opening), most)
        except (SpecialTokenError, UncutText) as error:
            raise PromptError(str(error)) from error
        return _around(Affixes(self.chat_prefix), ids)

    def _after_reasoning(self, text: str, opening: str) -> str:
        """Return the opening of the assistant's turn, after the end of reasoning if it has begun.

        The template may end the prompt with the mark that begins the reasoning.
        """
        if not opening or not self.reasoning or not text.rstrip().endswith(self.reasoning.begin):
            return opening
        return f"\n{self.reasoning.end}\n\n{opening}"

    def write(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Render a conversation with the chat template, and return the text of the prompt.

        Raises:
            PromptError: the model has no chat template, or its template rejects the messages.
        """
        text, marks = self._written(messages, tools, arguments)
        return "".join(piece.text for piece in marks.pieces(text)) if marks else text

    def _written(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        end: inference_pb2.PromptEnd = inference_pb2.PROMPT_END_REPLY,
    ) -> tuple[str, ClearMarks | None]:
        """Render a conversation. With a guard, its messages cannot spell special tokens.

        During rendering, private-use characters (marks) stand in for some characters of the
        messages. Without a guard (`trusts_special_tokens`), nothing is marked.

        Returns:
            The rendered text, and an object that turns its marks back into the original characters.
            The object is None if nothing was marked.
        """
        if self.template is None:
            raise PromptError("the model has no chat template; use /v1/completions")

        try:
            marked = self.guard.marked(messages, tools, arguments) if self.guard else None
            if marked is None:
                text = self.template.render(
                    messages, tools=tools, arguments=arguments, **ending(end)
                )
                return text, None
            text = self.template.render(
                marked.turns, tools=marked.tools, arguments=marked.arguments, **ending(end)
            )
            # The marked turns are as large as the text, so they are freed here.
            return text, marked.marks
        except (ChatTemplateError, SpecialTokenError) as error:
            raise PromptError(str(error)) from error

    def encode(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return a raw prompt's token ids, including the tokenizer's prefix and suffix tokens.

        These tokens (such as BOS and EOS) are added only where the prompt lacks them. If the text
        spells out a special token, such as `<s>`, it is encoded as that token, because a raw prompt
        is the model's complete input.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: the text has more than `most` tokens.
        """
        return _around(self.affixes, self.encode_bare(text, most))

    def encode_bare(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return a raw prompt's token ids as `encode` does, but without adding special tokens.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: the text has more than `most` tokens.
        """
        try:
            return self.encoder.encode(text, most)
        except UncutText as error:
            raise PromptError(str(error)) from error

    def encode_whole(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return a text's token ids, always enclosed in the tokenizer's prefix and suffix tokens.

        Embedding models are trained with these tokens (such as BOS and EOS). If the text spells out
        a special token, such as `<s>`, it is encoded as ordinary text.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: the text has more than `most` tokens.
        """
        ids = self.encode_guarded(text, most)
        return array("I", self.affixes.prefix) + ids + array("I", self.affixes.suffix)

    def encode_guarded(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return a text's token ids as `encode_whole` does, but without adding special tokens.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: the text has more than `most` tokens.
        """
        try:
            if self.guard and self.guard.guarded:
                return self.encoder.encode_pieces([TokenPiece(text)] if text else [], most)
            return self.encoder.encode(text, most)
        except (SpecialTokenError, UncutText) as error:
            raise PromptError(str(error)) from error

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens in a text, without tokenising it."""
        return self.bound.fewest(text)

    def count_tokens(self, text: str, most: int) -> int:
        """Return a lower bound on the number of tokens in a part of a prompt.

        Counting stops as soon as the bound exceeds `most`, and needs little memory because no token
        ids are kept.

        Raises:
            PromptError: neither this part nor any prompt that contains it can be tokenised.
        """
        fewest = self.fewest_tokens(text) - EDGE_TOKENS
        if fewest > most:
            return fewest
        try:
            return self.encoder.count(text, most)
        except UncutText as error:
            raise PromptError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that the token ids represent, including special tokens."""
        # Unlike `decode`, this releases the GIL.
        texts: list[str] = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return texts[0]


def _around(affixes: Affixes, ids: TokenIds) -> TokenIds:
    """Add the tokenizer's prefix and suffix tokens (such as BOS and EOS) where they are missing."""
    prefix, suffix = affixes.missing(ids)
    return array("I", prefix) + ids + array("I", suffix) if prefix or suffix else ids


def fingerprint(response: inference_pb2.GetModelResponse) -> str:
    """Return a digest of the model's task and of everything else that affects its token ids."""
    digest = hashlib.sha256(response.tokenizer_json)
    for part in (response.chat_template, response.bos_token, response.eos_token):
        digest.update(b"\0" + part.encode())
    digest.update(bytes([response.add_bos]))
    for later in _later_parts(response):
        digest.update(b"\0" + later)
    if response.task == inference_pb2.TASK_EMBED:
        digest.update(b"\0embeddings")
    return digest.hexdigest()[:16]


def _later_parts(response: inference_pb2.GetModelResponse) -> list[bytes]:
    """Return the data that releases after 0.1.0 have added to the fingerprint.

    Engines of version 0.1.0 do not report these fields. Empty fields are omitted, so that the
    fingerprint of such an engine does not change.
    """
    defaults = response.sampling_defaults.SerializeToString(deterministic=True)
    parts = {
        b"tools": response.tool_chat_template.encode(),
        b"tokens": repr(sorted(response.special_tokens.items())).encode(),
        b"sampling": defaults,
        b"chat_adds_bos": b"1" if response.chat_adds_bos else b"",
    }
    return [name + b"\0" + part for name, part in parts.items() if part]


def load_model(
    response: inference_pb2.GetModelResponse,
    trusts_special_tokens: bool = False,
    reasoning: str = "auto",
) -> Model:
    """Build the router's `Model` from an engine's description of its model.

    This takes up to a second for a large vocabulary.

    Args:
        response: the engine's description of its model.
        trusts_special_tokens: whether client text that spells out a special token is encoded as
            that token.
        reasoning: name of the format of reasoning, "auto" to detect it from the chat template, or
            "off" to leave reasoning in the text.

    Raises:
        ValueError: the tokenizer or the chat template is invalid.
    """
    try:
        tokenizer = Tokenizer.from_buffer(response.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = (
            ChatTemplate(
                response.chat_template, special_tokens(response), response.tool_chat_template
            )
            if response.chat_template
            else None
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"model {response.model}: tokenizer: {error}") from error

    literals = template.literals if template else ()
    guard = None if trusts_special_tokens else SpecialTokenGuard(tokenizer, literals)
    model = Model(
        name=response.model,
        fingerprint=fingerprint(response),
        tokenizer=tokenizer,
        encoder=SegmentEncoder(tokenizer, guarded=guard.guarded if guard else ()),
        template=template,
        affixes=_affixes(tokenizer, response),
        chat_prefix=_bos(tokenizer, response) if response.chat_adds_bos else (),
        vocab_size=response.vocab_size or tokenizer.get_vocab_size(),
        bound=token_bound(tokenizer),
        guard=guard,
        description=response,
        reasoning=_reasoning(template, reasoning),
        added_tokens={
            added.content: added for added in tokenizer.get_added_tokens_decoder().values()
        },
    )
    trim_heap()  # parsing took as much memory again
    freeze_gc()
    return model


def _reasoning(template: ChatTemplate | None, name: str) -> ReasoningFormat | None:
    if template is None or name == "off":
        return None
    return reasoning_format(template.source) if name == "auto" else REASONING_FORMATS[name]


def special_tokens(response: inference_pb2.GetModelResponse) -> dict[str, str]:
    """Return the special tokens' texts by name. Old engine versions report only two of them."""
    two = {"bos_token": response.bos_token, "eos_token": response.eos_token}
    return dict(response.special_tokens) or {name: text for name, text in two.items() if text}


def _affixes(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> Affixes:
    """Return the special tokens that are added before and after raw text.

    For tokenizers from GGUF files, older engine versions report these tokens only as `add_bos`.
    """
    affixes = affixes_of(tokenizer)
    if affixes == Affixes() and response.add_bos:
        return Affixes(_bos(tokenizer, response))
    return affixes


def _bos(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> tuple[int, ...]:
    token_id = tokenizer.token_to_id(response.bos_token)
    return () if token_id is None else (token_id,)
