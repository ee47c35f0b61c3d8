"""Tokenises texts segment by segment, and caches the token ids of segments.

A conversation is sent again with every turn, and many conversations start with the same
instructions. Tokenizers first split a text at its special tokens, and then tokenise each segment in
between separately. A segment therefore has the same token ids in every text. They are cached by the
segment's digest, so that only new segments have to be tokenised. The text itself is not kept.

Long texts are tokenised in chunks, and tokenisation stops as soon as a text has too many tokens.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from hashlib import blake2b
from typing import TypeAlias, cast

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

from ullage_common.chat.guarded_tokenizer import GuardedTokenizer
from ullage_common.chat.token_finder import TokenPiece, finder, parted
from ullage_router.text_bounds import TextCutter

MAX_BYTES = 16 << 20
"""Maximum size of the cached token ids in bytes."""
ENTRY_BYTES = 250
"""Overhead of a cache entry in bytes: its digest, its array object and their hash table slots."""
MAX_TOKENS = 1 << 30
"""Token limit that no text can reach, used to mean "no limit"."""
EDGE_TOKENS = 8
"""Maximum number of tokens that a text may lose when it is joined with its neighbours.

Tokens at its edges can merge with the neighbouring text.
"""

_LOCAL = (ByteLevel, Digits, Punctuation, Split)
"""Pre-tokenizers that treat a segment the same way regardless of what precedes it.

`Metaspace`, in contrast, depends on whether the segment is the first in the text.
"""

Tokenise = Callable[[str], list[int]]
TokenIds: TypeAlias = "array[int]"
"""An array of token ids, four bytes each. A list would take nine times as much memory."""


class TooManyTokens(Exception):
    """Raised if a text exceeds the maximum number of tokens. The rest of it was not tokenised."""


class SegmentEncoder:
    """Produces the same token ids as the tokenizer, but caches them for each segment of a text.

    Segments are the parts of a text between special tokens. If a tokenizer does not split texts at
    special tokens, neither does the encoder. The encoder is thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        max_bytes: maximum bytes of cached token ids.
        guarded: texts of special tokens. Ordinary text that spells one out is not encoded as that
            token.
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
        """Cached token ids by segment digest, least recently used first."""
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the size of the cache in bytes."""
        return self._bytes

    @property
    def pattern(self) -> str:
        """Return the regular expression for the segment boundaries (empty if there are none)."""
        return self._boundaries.pattern if self._boundaries else ""

    def encode(self, text: str, most: int = MAX_TOKENS) -> TokenIds:
        """Return the token ids of a text, without adding special tokens.

        Args:
            text: the text. Special tokens that it spells out are encoded as those tokens.
            most: maximum number of tokens, beyond which tokenisation is stopped.

        Raises:
            TooManyTokens: the text has more than `most` tokens.
            UncutText: the text cannot be tokenised in chunks.
        """
        if self._boundaries is None:
            return _counted(self._tokenise(text, self._encode), most)
        return self._join(parted(text, self._boundaries), self._encode, most)

    def count(self, text: str, most: int) -> int:
        """Return a lower bound on the number of tokens in a part of a text.

        Counting stops as soon as the bound exceeds `most`. Each special token counts as one token.
        Tokens at the edges are not counted, because they may merge with neighbouring text. No token
        ids are kept.

        Raises:
            UncutText: no text that contains this part can be tokenised in chunks.
        """
        number = -EDGE_TOKENS
        for piece in parted(text, self._boundaries):
            for ids in self._tokenise(piece.text, self._encode, is_part=True):
                number += len(ids)
                if number > most:
                    return number
        return max(0, number)

    def encode_pieces(self, pieces: Iterable[TokenPiece], most: int = MAX_TOKENS) -> TokenIds:
        """Return the token ids of a text given as a series of special tokens and ordinary text.

        A special token is encoded as that token. Ordinary text is never encoded as one of the
        `guarded` special tokens, even if it spells one out.

        Raises:
            SpecialTokenError: ordinary text would be encoded as one of the `guarded` tokens.
            TooManyTokens: the text has more than `most` tokens.
            UncutText: the text cannot be tokenised in chunks.
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
        """Split the text into chunks, and yield each chunk's token ids."""
        return map(tokenise, self._cutter.pieces(text, is_part))

    def _encode(self, text: str) -> list[int]:
        # The fast call computes no offsets, which would take a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _counted(parts: Iterable[Iterable[int]], most: int) -> TokenIds:
    """Concatenate token ids, and raise TooManyTokens if there are more than `most`."""
    ids = array("I")
    for part in parts:
        ids.extend(part)
        if len(ids) > most:
            raise TooManyTokens
    return ids


def _size(ids: TokenIds) -> int:
    return len(ids) * ids.itemsize + ENTRY_BYTES


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens' ids by text (empty if the tokenizer does not split at them)."""
    added = tokenizer.get_added_tokens_decoder()
    is_cut = isinstance(tokenizer.model, BPE) and not tokenizer.model.dropout
    if not is_cut or any(map(_looks_around, added.values())):
        return {}
    if not all(isinstance(step, _LOCAL) for step in _steps(tokenizer.pre_tokenizer)):
        return {}
    return {token.content: token_id for token_id, token in added.items()}


def _looks_around(token: AddedToken) -> bool:
    """Return whether the text around a token affects whether the token is recognised.

    For example, a `single_word` token is not recognised inside a longer word.
    """
    return bool(token.single_word or token.lstrip or token.rstrip or token.normalized)


def _steps(pre_tokenizer: PreTokenizer | None) -> Iterator[PreTokenizer]:
    """Yield the individual steps of a pre-tokenizer, which may be a sequence of them."""
    if isinstance(pre_tokenizer, PreTokenizers):
        for part in cast(Iterable[PreTokenizer], pre_tokenizer):  # iterates by __getitem__
            yield from _steps(part)
    elif pre_tokenizer is not None:
        yield pre_tokenizer
