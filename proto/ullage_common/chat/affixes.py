"""The special tokens that a tokenizer adds around a text, such as BOS and EOS.

Routers and engines tokenise raw prompts in the same way. The post-processor in tokenizer.json
defines the special tokens to add. If a prompt's text already spells one of them, it is not added a
second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_PROBE = "a"


class EncodedText(Protocol):
    """Protocol for `tokenizers.Encoding`, so that this module does not import `tokenizers`."""

    @property
    def ids(self) -> list[int]: ...


class Encoder(Protocol):
    """Protocol for `tokenizers.Tokenizer`, so that this module does not import `tokenizers`."""

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> EncodedText: ...


@dataclass(frozen=True, slots=True)
class Affixes:
    """The token ids that a tokenizer adds before and after every raw text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def around(self, ids: list[int]) -> list[int]:
        """Return a text's token ids with the tokenizer's prefix and suffix tokens added.

        These are tokens such as BOS and EOS. A prefix or suffix that is already present is not
        added again.
        """
        prefix, suffix = self.missing(ids)
        return [*prefix, *ids, *suffix] if prefix or suffix else ids

    def missing(self, ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the prefix and suffix tokens that must be added to a text's token ids.

        The prefix is empty if the text already starts with it, and the suffix is empty if the text
        already ends with it.
        """
        prefix = () if tuple(ids[: len(self.prefix)]) == self.prefix else self.prefix
        end = len(ids) - len(self.suffix)
        has_suffix = end >= 0 and tuple(ids[end:]) == self.suffix
        return prefix, () if has_suffix else self.suffix


def affixes_of(tokenizer: Encoder) -> Affixes:
    """Return the tokens that the tokenizer's post-processor adds around a text."""
    if not tokenizer.encode("").ids:
        return Affixes()
    bare = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE).ids
    for start in range(len(whole) - len(bare) + 1):
        end = start + len(bare)
        if whole[start:end] == bare:
            return Affixes(tuple(whole[:start]), tuple(whole[end:]))
    return Affixes()
