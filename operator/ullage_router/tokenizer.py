"""Converts text to token ids once a request, with the tokenizer that the engines publish, and keeps
the ids of text that is likely to come again.

A conversation comes back with every turn, and all conversations begin with the same instructions.
Tokenizers cut a text at their special tokens first and tokenise what is between two of them by
itself, so the ids of such a segment are the same wherever it stands: they are kept, and only new
segments are tokenised. Segments are known by their digests; no text is kept.
"""

import asyncio
import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeVar, cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Punctuation,
    Split,
)
from tokenizers.pre_tokenizers import (
    Sequence as PreTokenizers,
)

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.affixes import Affixes, affixes_of
from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.chat.tool_formats import ToolFormat, Turn
from ullage_common.process.memory import freeze_gc, trim_heap

MAX_BYTES = 16 << 20
# Of the digest, the array and their places in the table.
ENTRY_BYTES = 250

# What these make of a segment depends on nothing before it. `Metaspace`, for one, looks whether it
# is the text's first.
_LOCAL = (ByteLevel, Digits, Punctuation, Split)


_Tree = dict[str, "_Tree"]


class SegmentEncoder:
    """Encodes as the tokenizer does, whole where its special tokens are no such boundaries.

    May be used by several threads.

    Args:
        tokenizer: of the model.
        max_bytes: that may be kept.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._special_ids = _special_ids(tokenizer)
        self._boundaries = _finder(self._special_ids)
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        """Token ids by the segment's digest; the latest used is last."""
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the ids that are kept."""
        return self._bytes

    @property
    def pattern(self) -> str:
        """What finds the places to cut at; empty where there are none."""
        return self._boundaries.pattern if self._boundaries else ""

    def encode(self, text: str) -> list[int]:
        """Token ids, without any that the text does not ask for."""
        if self._boundaries is None:
            return self._tokenise(text)
        ids: list[int] = []
        start = 0
        for match in self._boundaries.finditer(text):
            if start < match.start():
                ids.extend(self._segment(text[start : match.start()]))
            ids.append(self._special_ids[match.group()])
            start = match.end()
        if start < len(text):
            ids.extend(self._segment(text[start:]))
        return ids

    def _segment(self, segment: str) -> "array[int]":
        key = blake2b(segment.encode(), digest_size=16).digest()
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
                return ids
        ids = array("I", self._tokenise(segment))
        with self._lock:
            self._keep(key, ids)
        return ids

    def _keep(self, key: bytes, ids: "array[int]") -> None:
        if key not in self._kept:
            self._kept[key] = ids
            self._bytes += _size(ids)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def _tokenise(self, text: str) -> list[int]:
        # Without offsets, which nobody here reads and which take a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _size(ids: "array[int]") -> int:
    return len(ids) * ids.itemsize + ENTRY_BYTES


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens and their ids; none where they do not part a text for the tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    is_cut = isinstance(tokenizer.model, BPE) and not tokenizer.model.dropout
    if not is_cut or any(map(_looks_around, added.values())):
        return {}
    if not all(isinstance(step, _LOCAL) for step in _steps(tokenizer.pre_tokenizer)):
        return {}
    return {token.content: token_id for token_id, token in added.items()}


def _looks_around(token: AddedToken) -> bool:
    """Whether what is beside it decides if it is one, or goes into it."""
    return bool(token.single_word or token.lstrip or token.rstrip or token.normalized)


def _steps(pre_tokenizer: PreTokenizer | None) -> Iterator[PreTokenizer]:
    """What a pre-tokenizer is made of."""
    if isinstance(pre_tokenizer, PreTokenizers):
        for part in cast(Iterable[PreTokenizer], pre_tokenizer):  # by __getitem__
            yield from _steps(part)
    elif pre_tokenizer is not None:
        yield pre_tokenizer


def _finder(special_ids: Iterable[str]) -> re.Pattern[str] | None:
    """Finds special tokens: of those that begin at one place the longest.

    A thousand of them are no slower than one: at each character one branch is left.
    """
    tree: _Tree = {}
    for text in special_ids:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: _Tree) -> str:
    """Matches what is in a tree of characters; a place where a text may end has the key ''."""
    branches = [re.escape(c) + _pattern(node) for c, node in tree.items() if c]
    if "" not in tree and len(branches) == 1:
        return branches[0]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


# Encoding this many characters takes about a millisecond; longer texts leave the event loop.
INLINE_CHARACTERS = 4096
TOKENIZER_THREADS = 2

T = TypeVar("T")


class PromptError(Exception):
    """The prompt cannot become tokens; the message is one line."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the router knows of the served model."""

    name: str
    fingerprint: str
    """Fingerprint that is equal for engines whose token ids mean the same and are for the same."""
    tokenizer: Tokenizer
    encoder: SegmentEncoder
    template: ChatTemplate | None
    affixes: Affixes
    """Special tokens around raw prompts."""
    chat_prefix: tuple[int, ...]
    """Tokens that conversations begin with, whether or not the template writes them."""
    vocab_size: int
    bytes_per_token: int
    """The most that one token can stand for; 0 when the tokenizer does not let one say."""
    description: inference_pb2.GetModelResponse

    @property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes calls."""
        return self.template.tool_format if self.template else ToolFormat.PLAIN

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: turns, oldest first.
            tools: functions that the model may call, as OpenAI has them.
            opening: text that the assistant's turn begins with.
            arguments: variables of the template.

        Raises:
            PromptError: the model has no chat template or its template refuses the messages.
        """
        if self.template is None:
            raise PromptError("the model has no chat template; use /v1/completions")
        try:
            text = self.template.render(messages, tools=tools, arguments=arguments)
        except ChatTemplateError as error:
            raise PromptError(str(error)) from error
        return Affixes(self.chat_prefix).around(self.encoder.encode(text + opening))

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text."""
        return self.affixes.around(self.encoder.encode(text))

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of text with the special tokens that the tokenizer itself puts around it, which
        models for embeddings are trained with."""
        [encoding] = self.tokenizer.encode_batch_fast([text])
        return list(encoding.ids)

    def fewest_tokens(self, text: str) -> int:
        """A bound from below that costs no tokenising."""
        return len(text.encode()) // self.bytes_per_token if self.bytes_per_token else 0

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def fingerprint(response: inference_pb2.GetModelResponse) -> str:
    """Identifies what turns text into token ids, and what these are for."""
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
    """Returns what engines of 0.1.0 do not say, where there is any: their fingerprints stay."""
    defaults = response.sampling_defaults.SerializeToString(deterministic=True)
    parts = {
        b"tools": response.tool_chat_template.encode(),
        b"tokens": repr(sorted(response.special_tokens.items())).encode(),
        b"sampling": defaults,
        b"chat_adds_bos": b"1" if response.chat_adds_bos else b"",
    }
    return [name + b"\0" + part for name, part in parts.items() if part]


def load_model(response: inference_pb2.GetModelResponse) -> Model:
    """Builds the tokenizer; takes up to a second for a large vocabulary.

    Raises:
        ValueError: the tokenizer or the chat template is not valid.
    """
    try:
        tokenizer = Tokenizer.from_buffer(response.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = (
            ChatTemplate(
                response.chat_template, _special_tokens(response), response.tool_chat_template
            )
            if response.chat_template
            else None
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"model {response.model}: tokenizer: {error}") from error
    model = Model(
        name=response.model,
        fingerprint=fingerprint(response),
        tokenizer=tokenizer,
        encoder=SegmentEncoder(tokenizer),
        template=template,
        affixes=_affixes(tokenizer, response),
        chat_prefix=_bos(tokenizer, response) if response.chat_adds_bos else (),
        vocab_size=response.vocab_size or tokenizer.get_vocab_size(),
        bytes_per_token=_bytes_per_token(tokenizer),
        description=response,
    )
    trim_heap()  # parsing took as much again
    freeze_gc()
    return model


def _special_tokens(response: inference_pb2.GetModelResponse) -> dict[str, str]:
    """Returns texts of special tokens by name; engines of earlier versions name but two."""
    two = {"bos_token": response.bos_token, "eos_token": response.eos_token}
    return dict(response.special_tokens) or {name: text for name, text in two.items() if text}


def _affixes(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> Affixes:
    """Returns the special tokens around raw text; engines of earlier versions say by add_bos alone
    what the tokenizers of GGUF files add."""
    affixes = affixes_of(tokenizer)
    if affixes == Affixes() and response.add_bos:
        return Affixes(_bos(tokenizer, response))
    return affixes


def _bos(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> tuple[int, ...]:
    token_id = tokenizer.token_to_id(response.bos_token)
    return () if token_id is None else (token_id,)


def _bytes_per_token(tokenizer: Tokenizer) -> int:
    """The longest entry of a byte-level vocabulary; a normalizer could shorten the text first."""
    if tokenizer.normalizer is not None:
        return 0
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)


class TokenizerThreads:
    """Keeps long texts off the event loop; the tokenizer releases the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, made here when it is short."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
