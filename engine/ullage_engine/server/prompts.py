"""Tokenises text prompts, chat conversations and texts to embed."""

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.chat.guarded_tokenizer import GuardedTokenizer
from ullage_common.chat.special_tokens import SpecialTokenGuard
from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.chat.template_arguments import read_arguments, refuse_unread
from ullage_common.chat.token_finder import SpecialTokenError
from ullage_common.chat.turns import TURN_CHARACTERS, ending, make_turns
from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import ModelTokenizer

LONG_TEXT_CHARACTERS = 20_000
"""Minimum length in characters of inputs that are rendered and tokenised in a thread.

10 kB take about 1 ms.
"""


@dataclass(frozen=True)
class TokenizerBundle:
    """The served model's tokenizer and chat template."""

    tokenizer: ModelTokenizer
    token_bytes: TokenBytes
    chat: ChatTemplate | None
    """The model's chat template, or None if it has none."""
    guard: SpecialTokenGuard
    """Prevents client text that looks like a special token from being tokenised as one."""
    guarded: GuardedTokenizer
    """Tokenizer that never produces special tokens from text supplied by clients."""


async def prompt_ids(request: pb.GenerateRequest, tokenizer_bundle: TokenizerBundle) -> list[int]:
    """Return the token ids of a request's whole prompt. Long texts are tokenised in a thread.

    Raises:
        ServiceError: the text contains special tokens, or the template cannot render the messages.
    """
    if request.WhichOneof("input") == "token_ids":
        return list(request.token_ids.ids)
    if request.WhichOneof("input") == "text":
        # A raw prompt is the model's whole input, so its special tokens count as such.
        text = request.text
        if request.embed:
            ids_of = _guarded_ids if request.omit_special_tokens else _embedded_ids
        else:
            ids_of = _bare_ids if request.omit_special_tokens else _text_ids
        encode: Callable[[], list[int]] = functools.partial(ids_of, text, tokenizer_bundle)
    else:
        messages = request.messages
        render = functools.partial(_render, messages, tokenizer_bundle)
        size = messages.ByteSize() + TURN_CHARACTERS * len(messages.messages)
        is_short = size < LONG_TEXT_CHARACTERS
        text, encode = render() if is_short else await asyncio.to_thread(render)
    try:
        if len(text) < LONG_TEXT_CHARACTERS:
            return encode()
        return await asyncio.to_thread(encode)
    except SpecialTokenError as error:
        raise invalid(request.WhichOneof("input") or "text", str(error)) from error


def bad_word_ids(words: Iterable[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words that an answer must not contain.

    As in vLLM, a word counts within text as well, where a blank precedes it, if its first token is
    another one there and its length is the same.

    Raises:
        ServiceError: a word has no tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode_bare(word.lstrip()))
        if not bare:
            raise invalid_value("bad_words", word, "words that have tokens")
        sequences.append(bare)
        inner = tuple(tokenizer.encode_bare(" " + word.lstrip()))
        if inner[0] != bare[0] and len(inner) == len(bare):
            sequences.append(inner)
    return tuple(dict.fromkeys(sequences))


def _text_ids(text: str, tokenizer_bundle: TokenizerBundle) -> list[int]:
    return tokenizer_bundle.tokenizer.encode_text(text)


def _bare_ids(text: str, tokenizer_bundle: TokenizerBundle) -> list[int]:
    return tokenizer_bundle.tokenizer.encode_bare(text)


def _embedded_ids(text: str, tokenizer_bundle: TokenizerBundle) -> list[int]:
    affixes = tokenizer_bundle.tokenizer.affixes
    return [*affixes.prefix, *_guarded_ids(text, tokenizer_bundle), *affixes.suffix]


def _guarded_ids(text: str, tokenizer_bundle: TokenizerBundle) -> list[int]:
    return tokenizer_bundle.guarded.encode(text)


def _render(
    messages: pb.Messages, tokenizer_bundle: TokenizerBundle
) -> tuple[str, Callable[[], list[int]]]:
    """Render a conversation as text. Return the text and a function that tokenises it."""
    chat = tokenizer_bundle.chat
    tokenizer = tokenizer_bundle.tokenizer
    if chat is None:
        raise invalid("messages", "the model has no chat template; send text or token_ids")
    try:
        field = "messages.template_arguments"
        arguments, ignored = read_arguments(messages.template_arguments, chat, field)
        refuse_unread(ignored, chat)
        turns = make_turns(messages.messages)
        end = ending(messages.end)
        marked = tokenizer_bundle.guard.marked(turns, (), arguments)
        if marked is None:
            text = chat.render(turns, arguments=arguments, **end)
            return text, functools.partial(tokenizer.encode_rendered, text)
        text = chat.render(marked.turns, arguments=marked.arguments, **end)
    except (ChatTemplateError, SpecialTokenError) as error:
        raise invalid("messages", str(error)) from error
    guarded = tokenizer_bundle.guarded
    return text, lambda: tokenizer.begin(guarded.encode(guarded.spell(marked.pieces(text))))
