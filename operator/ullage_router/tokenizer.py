"""Converts text to token ids once a request, with the tokenizer that the engines publish, and keeps
the ids of text that is likely to come again.

A conversation comes back with every turn, and all conversations begin with the same instructions.
Tokenizers cut a text at their special tokens first and tokenise what is between two of them by
itself, so the ids of such a segment are the same wherever it stands: they are kept, and only new
segments are tokenised. Segments are known by their digests; no text is kept.

A long text is tokenised in pieces, up to as many tokens as are of use.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias, cast

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
from ullage_common.chat.guarded_tokenizer import GuardedTokenizer
from ullage_common.chat.special_tokens import ClearMarks, SpecialTokenGuard
from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.chat.token_finder import SpecialTokenError, TokenPiece, finder, parted
from ullage_common.chat.tool_formats import ToolFormat, Turn
from ullage_common.process.memory import freeze_gc, trim_heap
from ullage_router.text_bounds import TextCutter, TokenBound, UncutText, token_bound

MAX_BYTES = 16 << 20
MAX_TOKENS = 1 << 30
"""Number of tokens that no text has."""
EDGE_TOKENS = 8
"""Tokens of a part of a text that may be fewer beside its neighbours."""
# Of the digest, the array and their places in the table.
ENTRY_BYTES = 250

# What these make of a segment depends on nothing before it. `Metaspace`, for one, looks whether it
# is the text's first.
_LOCAL = (ByteLevel, Digits, Punctuation, Split)

Tokenise = Callable[[str], list[int]]
TokenIds: TypeAlias = "array[int]"
"""Token ids at four bytes each: a list takes nine times as much."""


class TooManyTokens(Exception):
    """A text has more tokens than are of use; not all of them were made."""


class SegmentEncoder:
    """Encodes as the tokenizer does, whole where its special tokens are no such boundaries.

    May be used by several threads.

    Args:
        tokenizer: of the model.
        max_bytes: that may be kept.
        guarded: texts of tokens that pieces of text never become.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES, guarded: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._guarded = GuardedTokenizer(tokenizer, guarded) if guarded else None
        self._cutter = TextCutter(tokenizer)
        self._max_bytes = max_bytes
        self._special_ids = _special_ids(tokenizer)
        self._boundaries = finder(self._special_ids)
        self._kept: OrderedDict[bytes, TokenIds] = OrderedDict()
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

    def encode(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return token ids, without any that the text does not ask for.

        Args:
            most: the number of tokens above which they are of no use.

        Raises:
            TooManyTokens: there are more.
            UncutText: the text cannot be tokenised in pieces.
        """
        if self._boundaries is None:
            return _counted(self._tokenise(text, self._encode), most)
        return self._join(parted(text, self._boundaries), self._encode, most)

    def count(self, text: str, most: int) -> int:
        """Return a lower bound of the tokens that a part of a text has, or a number above `most`:
        special tokens count as such, and what the part's neighbours may join is left out. No token
        id is kept.

        Raises:
            UncutText: the text cannot be tokenised in pieces, whatever is around the part.
        """
        number = -EDGE_TOKENS
        for piece in parted(text, self._boundaries):
            for ids in self._tokenise(piece.text, self._encode, is_part=True):
                number += len(ids)
                if number > most:
                    return number
        return max(0, number)

    def encode_pieces(self, pieces: Iterable[TokenPiece], most: int = MAX_TOKENS) -> TokenIds:
        """Return the token ids of a text whose only guarded tokens are the pieces that are tokens.

        Raises:
            SpecialTokenError: a piece of text would become a guarded token.
            TooManyTokens: there are more.
            UncutText: the text cannot be tokenised in pieces.
        """
        guarded = self._guarded
        assert guarded, "tokens are guarded where texts have pieces"
        if self._boundaries is None:
            return _counted(self._tokenise(guarded.spell(pieces), guarded.encode), most)
        return self._join(pieces, guarded.encode, most)

    def _join(self, pieces: Iterable[TokenPiece], tokenise: Tokenise, most: int) -> TokenIds:
        ids = array("I")
        for piece in pieces:
            if piece.is_token:
                ids.append(self._special_ids[piece.text])
            else:
                ids.extend(self._segment(piece.text, tokenise, most - len(ids)))
        if len(ids) > most:
            raise TooManyTokens
        return ids

    def _segment(self, segment: str, tokenise: Tokenise, most: int) -> TokenIds:
        key = blake2b(segment.encode(), digest_size=16).digest()
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
                return ids
        ids = _counted(self._tokenise(segment, tokenise), most)
        with self._lock:
            self._keep(key, ids)
        return ids

    def _keep(self, key: bytes, ids: TokenIds) -> None:
        if key not in self._kept:
            self._kept[key] = ids
            self._bytes += _size(ids)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def _tokenise(
        self, text: str, tokenise: Tokenise, is_part: bool = False
    ) -> Iterator[list[int]]:
        """Yield token ids of one piece after another."""
        return map(tokenise, self._cutter.pieces(text, is_part))

    def _encode(self, text: str) -> list[int]:
        # Without offsets, which nobody here reads and which take a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _counted(parts: Iterable[Iterable[int]], most: int) -> TokenIds:
    ids = array("I")
    for part in parts:
        ids.extend(part)
        if len(ids) > most:
            raise TooManyTokens
    return ids


def _size(ids: TokenIds) -> int:
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


class PromptError(Exception):
    """The prompt cannot become tokens; the message is one line."""


@dataclass(frozen=True, slots=True)
class Model:
    """The served model, as the router knows it."""

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
    bound: TokenBound
    """How many tokens a text has at least."""
    guard: SpecialTokenGuard | None
    """Keeps texts of clients from becoming special tokens; None: they may."""
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
        most: int = MAX_TOKENS,
    ) -> TokenIds:
        """Return the token ids of a conversation.

        Args:
            messages: turns, oldest first.
            tools: functions that the model may call, as OpenAI has them.
            opening: text that the assistant's turn begins with.
            arguments: variables of the template.
            most: the number of tokens above which they are of no use.

        Raises:
            PromptError: the model has no chat template, its template refuses the messages, or they
                cannot be tokenised.
            TooManyTokens: there are more.
        """
        try:
            text, marks = self._written(messages, tools, arguments)
            if marks is None:
                ids = self.encoder.encode(text + opening, most)
            else:
                ids = self.encoder.encode_pieces(marks.pieces(text + opening), most)
        except (SpecialTokenError, UncutText) as error:
            raise PromptError(str(error)) from error
        return _around(Affixes(self.chat_prefix), ids)

    def write(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation's prompt.

        Raises:
            PromptError: as `render`.
        """
        text, marks = self._written(messages, tools, arguments)
        return "".join(piece.text for piece in marks.pieces(text)) if marks else text

    def _written(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> tuple[str, ClearMarks | None]:
        """Return the text of a conversation's prompt, and the means to remove its marks."""
        if self.template is None:
            raise PromptError("the model has no chat template; use /v1/completions")
        try:
            marked = self.guard.marked(messages, tools, arguments) if self.guard else None
            if marked is None:
                return self.template.render(messages, tools=tools, arguments=arguments), None
            text = self.template.render(
                marked.turns, tools=marked.tools, arguments=marked.arguments
            )
            # Each form of a long text is as long: the marked turns end here.
            return text, marked.marks
        except (ChatTemplateError, SpecialTokenError) as error:
            raise PromptError(str(error)) from error

    def encode(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return the token ids of a raw prompt, in which special tokens count as such: it is all
        that the model reads.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: there are more than `most`.
        """
        try:
            ids = self.encoder.encode(text, most)
        except UncutText as error:
            raise PromptError(str(error)) from error
        return _around(self.affixes, ids)

    def encode_whole(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return the token ids of a text with those that the tokenizer itself puts around it, which
        models for embeddings are trained with. Special tokens that the text spells are text.

        Raises:
            PromptError: the text cannot be tokenised.
            TooManyTokens: there are more than `most`.
        """
        try:
            if self.guard and self.guard.guarded:
                ids = self.encoder.encode_pieces([TokenPiece(text)] if text else [], most)
            else:
                ids = self.encoder.encode(text, most)
        except (SpecialTokenError, UncutText) as error:
            raise PromptError(str(error)) from error
        return array("I", self.affixes.prefix) + ids + array("I", self.affixes.suffix)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens, without tokenising it."""
        return self.bound.fewest(text)

    def count_tokens(self, text: str, most: int) -> int:
        """Return a lower bound of the tokens of a part of a prompt, or a number above `most`, in
        little memory.

        Raises:
            PromptError: no prompt with that part can be tokenised.
        """
        fewest = self.fewest_tokens(text) - EDGE_TOKENS
        if fewest > most:
            return fewest
        try:
            return self.encoder.count(text, most)
        except UncutText as error:
            raise PromptError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def _around(affixes: Affixes, ids: TokenIds) -> TokenIds:
    """Return ids with their missing affixes."""
    prefix, suffix = affixes.missing(ids)
    return array("I", prefix) + ids + array("I", suffix) if prefix or suffix else ids


def fingerprint(response: inference_pb2.GetModelResponse) -> str:
    """Identify what turns text into token ids, and what these are for."""
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
    """Return what engines of 0.1.0 do not say, where there is any: their fingerprints stay."""
    defaults = response.sampling_defaults.SerializeToString(deterministic=True)
    parts = {
        b"tools": response.tool_chat_template.encode(),
        b"tokens": repr(sorted(response.special_tokens.items())).encode(),
        b"sampling": defaults,
        b"chat_adds_bos": b"1" if response.chat_adds_bos else b"",
    }
    return [name + b"\0" + part for name, part in parts.items() if part]


def load_model(
    response: inference_pb2.GetModelResponse, trusts_special_tokens: bool = False
) -> Model:
    """Build the tokenizer; takes up to a second for a large vocabulary.

    Args:
        trusts_special_tokens: whether texts of clients become the special tokens that they spell.

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
    )
    trim_heap()  # parsing took as much again
    freeze_gc()
    return model


def _special_tokens(response: inference_pb2.GetModelResponse) -> dict[str, str]:
    """Return texts of special tokens by name; engines of earlier versions name but two."""
    two = {"bos_token": response.bos_token, "eos_token": response.eos_token}
    return dict(response.special_tokens) or {name: text for name, text in two.items() if text}


def _affixes(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> Affixes:
    """Return the special tokens around raw text; engines of earlier versions say by add_bos alone
    what the tokenizers of GGUF files add."""
    affixes = affixes_of(tokenizer)
    if affixes == Affixes() and response.add_bos:
        return Affixes(_bos(tokenizer, response))
    return affixes


def _bos(tokenizer: Tokenizer, response: inference_pb2.GetModelResponse) -> tuple[int, ...]:
    token_id = tokenizer.token_to_id(response.bos_token)
    return () if token_id is None else (token_id,)
