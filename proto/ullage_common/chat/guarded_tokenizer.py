"""A tokenizer that never encodes ordinary text as a guarded token.

Guarded tokens are special tokens that client text must never produce, such as the end of a turn.
"""

import secrets
from collections.abc import Collection, Iterable

from tokenizers import AddedToken, Tokenizer

from ullage_common.chat.token_finder import SpecialTokenError, TokenPiece, finder

_FIRST_ALIAS = 0x100000
_LAST_ALIAS = 0x10FFFD
"""Last code point used in aliases, at the end of Unicode's last private-use area."""
_ALIAS_CHARACTERS = 5
"""Number of characters in an alias: 80 random bits, which no client can guess."""


class GuardedTokenizer:
    """A copy of a tokenizer that recognises its guarded tokens only by secret aliases.

    Guarded tokens are special tokens that client text must never produce. The copy has the same
    vocabulary, but a text that merely spells a guarded token is encoded as ordinary tokens. Only a
    `TokenPiece` with `is_token` set becomes the guarded token's id. As in the original tokenizer,
    the token splits the text around it. The copy is safe to use from several threads.

    Args:
        tokenizer: the model's tokenizer.
        guarded: texts of the guarded tokens.
    """

    def __init__(self, tokenizer: Tokenizer, guarded: Collection[str]) -> None:
        self._cut = _alias()
        self._aliases = {text: _alias() for text in guarded}
        self._finder = finder(guarded)
        self._tokenizer = _sharing(tokenizer)

        added = tokenizer.get_added_tokens_decoder()
        own = [self._renamed(added[token_id]) for token_id in sorted(added)]
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        # New tokens get ids from the vocabulary's size on. Fillers take those that the model has.
        gap = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        fillers = [AddedToken(_alias(), normalized=False) for _ in range(gap)]
        self._tokenizer.add_tokens([*fillers, AddedToken(self._cut, normalized=False), *own])

        self._ids = {
            self._tokenizer.token_to_id(mine.content): token_id
            for token_id, mine in zip(sorted(added), own, strict=True)
        }
        """Maps the added tokens' ids in this copy to their ids in the model."""
        self._cut_id = self._tokenizer.token_to_id(self._cut)
        self._forbidden = frozenset(vocabulary[text] for text in guarded if text in vocabulary)
        """Ids of guarded tokens in the base vocabulary, which even plain text could produce."""

    def spell(self, pieces: Iterable[TokenPiece]) -> str:
        """Join a prompt's pieces into a text for `encode`, with aliases for guarded tokens."""
        return "".join(
            self._aliases.get(piece.text, piece.text) if piece.is_token else piece.text
            for piece in pieces
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            SpecialTokenError: the base vocabulary turns ordinary text into a guarded token.
        """
        ids = self._encode(text)
        if ids is None:
            ids = self._encode(self._broken(text))
        if ids is None:
            raise SpecialTokenError(
                "this tokenizer makes a special token of the text; spell the token in another way"
            )
        return ids

    def _encode(self, text: str) -> list[int] | None:
        """Return token ids, or None if the base vocabulary has produced a guarded token."""
        # Offsets are unused here and would take a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._forbidden and not self._forbidden.isdisjoint(ids):
            return None
        return [self._ids.get(token_id, token_id) for token_id in ids if token_id != self._cut_id]

    def _broken(self, text: str) -> str:
        """Insert a boundary token into each guarded token that the text spells.

        The base vocabulary then cannot produce the guarded token. The boundary token's own id is
        dropped by `_encode`.
        """
        assert self._finder
        return self._finder.sub(lambda match: f"{match[0][0]}{self._cut}{match[0][1:]}", text)

    def _renamed(self, token: AddedToken) -> AddedToken:
        alias = self._aliases.get(token.content)
        normalizer = self._tokenizer.normalizer
        # If the normalizer removes characters of the alias, the alias must match before it runs.
        is_kept = normalizer is None or (alias or "") in normalizer.normalize_str(alias or "")
        return AddedToken(
            alias or token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and is_kept,
            special=token.special and alias is None,
        )


def _alias() -> str:
    span = _LAST_ALIAS + 1 - _FIRST_ALIAS
    return "".join(chr(_FIRST_ALIAS + secrets.randbelow(span)) for _ in range(_ALIAS_CHARACTERS))


def _sharing(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer without its added tokens.

    The copy shares the original's model, normalizer and pre-tokenizer.
    """
    bare = Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(bare, name, part)
    return bare
