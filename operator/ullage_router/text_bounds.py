"""Computes lower bounds on token counts, and splits long texts without changing their tokens.

The bounds and the rules for splitting are derived from the tokenizer when its model is loaded. If
the lower bound shows that a text cannot fit in the context, the text is refused before it is
tokenised. Other long texts are tokenised in chunks (`pieces`) of limited size.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

PIECE_CHARACTERS = 32 << 10
"""Target size of a chunk in characters. Tokenising one chunk takes a few megabytes of memory."""
LONGEST_PIECE = 128 << 10
"""Maximum length, in characters, of a stretch of text without a safe split point.

Texts with a longer stretch are refused.
"""
COUNTED_AT_ONCE = 64 << 10

_LETTERS = (string.ascii_letters + string.digits).encode()
_MARKS = string.punctuation.encode()

Json = Mapping[str, Any]


class UncutText(Exception):
    """Raised if a long text has no safe split point. The message is a single line."""


# --- Bounds ---


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Computes a lower bound on the number of tokens in a text.

    Each character of a text belongs to exactly one token. If no token that contains a certain
    character is longer than `n` characters, that character makes up at least 1/n of its token.
    Adding up these fractions over the whole text therefore gives a lower bound on its number of
    tokens. Separate maximum token lengths are kept for ASCII letters and digits, for ASCII
    punctuation, and for all other characters, because the longest tokens are runs of whitespace and
    would weaken the bound for words.

    A length of 0 means that such characters are not counted, because a token may contain any number
    of them.
    """

    letter: int = 0
    mark: int = 0
    other: int = 0
    shrink: int = 1
    """Maximum number of characters that the normalizer may merge into one character."""
    counts_bytes: bool = False
    """Whether a non-ASCII character counts once per UTF-8 byte, as in byte-level tokenizers."""
    composed: int = 0
    """Maximum length of tokens with letters or punctuation, for texts with non-ASCII characters.

    The value is 0 unless the normalizer may combine a letter with the accents that follow.
    """
    counts_words: bool = False
    """Whether to count words instead of characters, because no token spans two words."""

    def fewest(self, text: str) -> int:
        """Return a lower bound on the text's number of tokens.

        This takes about 3 ms per megabyte.
        """
        if self.counts_words:
            return sum(map(_num_words, _slices(text)))
        letters = marks = others = 0
        for part in _slices(text):
            data = part.encode(errors="replace")
            num_letters = len(data) - len(data.translate(None, _LETTERS))
            num_marks = len(data) - len(data.translate(None, _MARKS))
            letters += num_letters
            marks += num_marks
            others += (len(data) if self.counts_bytes else len(part)) - num_letters - num_marks
        is_composed = self.composed and not text.isascii()
        letter = self.composed if self.letter and is_composed else self.letter
        mark = self.composed if self.mark and is_composed else self.mark
        lengths = ((letters, letter), (marks, mark), (others, self.other))
        share = sum(count / length for count, length in lengths if length)
        # Rounded down by more than the rounding error of the sum.
        return int(share / self.shrink * (1 - 1e-9))


_WORD = re.compile(r"(?<![^ \n\t])[!-~]")
"""Matches an ASCII character that starts a word. No normalizer removes such a word."""


def _num_words(text: str) -> int:
    # The first word may belong to the slice before.
    return max(0, len(_WORD.findall(text)) - 1)


def _slices(text: str) -> Iterator[str]:
    return (text[i : i + COUNTED_AT_ONCE] for i in range(0, len(text), COUNTED_AT_ONCE))


def token_bound(tokenizer: Tokenizer) -> TokenBound:
    """Derive from a tokenizer a lower bound on the number of tokens in any text.

    If no bound can be derived, `fewest` of the returned object always returns 0.
    """
    model = tokenizer.model
    normalizer = _Normalizer.of(_state(tokenizer.normalizer))
    steps = list(_steps(_state(tokenizer.pre_tokenizer)))
    if normalizer is None or any(map(_may_remove_words, steps)):
        return TokenBound()

    kinds = {step["type"] for step in steps}
    added = tokenizer.get_added_tokens_decoder().values()
    if isinstance(model, models.WordPiece | models.WordLevel):
        # A word of any length may be one token. Blanks always separate words.
        has_blanks = any(len(token.content.split()) > 1 for token in added)
        parts_words = not has_blanks and normalizer.shrink == 1 and kinds & _PARTING
        return TokenBound(counts_words=bool(parts_words))
    if not isinstance(model, models.BPE | models.Unigram) or _has_affixes(model):
        return TokenBound()

    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    texts = {text: len(text) for text in vocabulary}
    texts |= {token.content: len(token.content.encode()) for token in added}
    is_byte_level = "ByteLevel" in kinds | normalizer.kinds
    is_complete = _is_complete(model, vocabulary, is_byte_level)
    if normalizer.composes and not is_complete:
        return TokenBound()  # a run of unknown characters is one token
    longest = max(texts.values(), default=0)
    has_strip = any(token.lstrip or token.rstrip for token in added)
    counts_others = normalizer.keeps_all and is_complete and kinds <= _KEEPING and not has_strip
    return TokenBound(
        letter=_longest(texts, vocabulary, _LETTERS),
        mark=_longest(texts, vocabulary, _MARKS),
        other=longest if counts_others else 0,
        shrink=normalizer.shrink,
        composed=longest if normalizer.composes else 0,
        counts_bytes=is_byte_level,
    )


_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that keep whitespace, unless their behaviour is `Removed`."""


_PARTING = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
"""Pre-tokenizers that drop whitespace but keep all other characters."""


def _longest(lengths: Mapping[str, int], vocabulary: Json, characters: bytes) -> int:
    """Return the length of the longest token that contains any of the given characters.

    Return 0 if some of the characters are missing from the vocabulary, because the model may then
    drop them.
    """
    if not vocabulary.keys() >= set(characters.decode()):
        return 0
    pattern = re.compile(f"[{re.escape(characters.decode())}]")
    return max(length for text, length in lengths.items() if pattern.search(text))


def _may_remove_words(step: Json) -> bool:
    """Return whether a pre-tokenizer step may remove characters other than whitespace."""
    if step["type"] in ("Punctuation", "Split"):
        return bool(step["behavior"] == "Removed")
    return step["type"] not in _KEEPING | _PARTING


def _has_affixes(model: models.BPE | models.Unigram) -> bool:
    """Return whether the model marks tokens inside or at the end of words, for example by `##`."""
    names = ("continuing_subword_prefix", "end_of_word_suffix")
    return any(getattr(model, name, None) for name in names)


def _is_complete(model: object, vocabulary: Json, is_byte_level: bool) -> bool:
    """Return whether the vocabulary covers every character, by its bytes if necessary.

    Otherwise, a run of unknown characters may become a single token of unbounded length.
    """
    if is_byte_level:
        return vocabulary.keys() >= set(ByteLevel.alphabet())
    if not isinstance(model, models.BPE):
        return False
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return bool(model.byte_fallback) and has_bytes


@dataclass(frozen=True, slots=True)
class _Normalizer:
    """Describes how much a normalizer may shorten a text."""

    kinds: frozenset[str] = frozenset()
    shrink: int = 1
    """Maximum number of non-blank ASCII characters that the normalizer may merge into one."""
    keeps_all: bool = True
    """Whether the normalizer never shortens a text."""
    composes: bool = False
    """Whether the normalizer may combine a letter with the accents that follow."""

    @classmethod
    def of(cls, state: Json | None) -> "_Normalizer | None":
        """Return how much a normalizer may shorten a text, or None if this is unknown."""
        if state is None:
            return cls()
        shrink = 1
        keeps_all = True
        kinds = set[str]()
        for step in _steps(state):
            kind = step["type"]
            kinds.add(kind)
            if kind == "Replace":
                pattern = step["pattern"]
                content = step["content"]
                if pattern.get("Regex") in _RUNS_OF_BLANKS:
                    keeps_all = False
                    continue
                replaced = pattern.get("String")
                if not replaced or not content:
                    return None
                shrink *= -(-len(replaced) // len(content))
                keeps_all = keeps_all and len(content) >= len(replaced)
            elif kind in _SHORTENING:
                keeps_all = False
            elif kind not in _LENGTHENING:
                return None
        return cls(frozenset(kinds), shrink, keeps_all, bool(kinds & {"NFC", "NFKC"}))


_RUNS_OF_BLANKS = frozenset({" {2,}", r"\s+", r"\s{2,}", " +"})
_LENGTHENING = frozenset({"ByteLevel", "Lowercase", "Prepend"})
"""Normalizers that never shorten a text."""
_SHORTENING = frozenset(
    {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"}
)
"""Normalizers that keep all ASCII characters except whitespace, possibly adding an accent."""


def _state(part: Any) -> Json | None:
    """Return the settings of a normalizer or pre-tokenizer, or None if there is none."""
    state: Json | None = json.loads(part.__getstate__()) if part else None
    return state


def _steps(state: Json | None) -> Iterator[Json]:
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for step in cast(Iterable[Json], state.get("normalizers", state.get("pretokenizers", ()))):
        yield from _steps(step)


# --- Cuts ---


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule for finding points at which a text can be split without changing its tokens."""

    place: str
    """Pattern that matches a split point, which is a position in the text or a single space."""
    crossed: str
    """Pattern that matches any vocabulary token that would span a split point of this rule."""
    drops_blank: bool = False
    """Whether to drop the space at the split point, because tokenizers add one before each text."""


_BLANK = "[ \u2581\u0120]"
_BREAK = "[\n\u010a]"
_WORD_BYTE = "[A-Za-z0-9\u0080-\u00ff\u0121-\u0143]"
"""Matches a letter, a digit, or one byte of another character in a byte-level vocabulary."""
_NOT_BLANK = "[^\\s\u0120\u010a\u010d\u0109\u2581]"
_MARKS_IN_DATA = '",;|]}'
"""Punctuation marks that are frequent in tables, lists and JSON but do not occur in words."""
_WIDE_MARKS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
"""Chinese and Japanese punctuation marks. These languages have no spaces between words."""


def _spelled(characters: str) -> str:
    """Return a regex that matches any of these characters as they appear in a vocabulary.

    Byte-level vocabularies spell characters differently, so the regex matches the characters
    themselves as well as their byte-level spellings.
    """
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    in_bytes = [letters.pre_tokenize_str(each)[0][0] for each in characters]
    return "|".join(map(re.escape, [*characters, *in_bytes]))


_RULES = (
    _Rule(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])", f"[A-Za-z0-9]{_BLANK}"),
    _Rule(r"(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])", f"[A-Za-z0-9]{_BLANK}", drops_blank=True),
    _Rule(r"(?<=[^\W_])(?=\n[^\s])", f"{_WORD_BYTE}{_BREAK}"),
    _Rule(r"(?<=\S\n)(?=[^\W_])", f"{_BREAK}{_WORD_BYTE}"),
    _Rule(r"(?<=[0-9])(?=[A-Za-z])", "[0-9][A-Za-z]"),
    _Rule(r"(?<=\S\n)(?=\S)", f"{_BREAK}{_NOT_BLANK}"),
    _Rule(r"(?<=\S\n\n)(?=\S)", f"{_BREAK}{_NOT_BLANK}"),
    *(
        _Rule(f"(?<=[A-Za-z0-9])(?={re.escape(mark)})", f"[A-Za-z0-9]{re.escape(mark)}")
        for mark in _MARKS_IN_DATA
    ),
    _Rule(
        f"(?<=[\u3040-\u30ff\u4e00-\u9fff])(?=[{_WIDE_MARKS}])",
        f"{_WORD_BYTE[:-1]}\u3040-\u30ff\u4e00-\u9fff](?:{_spelled(_WIDE_MARKS)})",
    ),
)

_SAMPLES = (
    "a b",
    "It's 12 of them, isn't it: 3a4 b5c",
    "The quick brown fox\njumps over\n\nthe lazy dog 7 times",
    "def f(x1, y2):\n    return x1 + y2\n\n\nclass A:\n\tb = 3e8 # 100km",
    "  two  blanks  here \n and   three\t tabs\t\tthere",
    "\u00e9t\u00e9 caf\u00e9 \u00fcber\nSt\u00fcck 5x",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\n\u7b2c2\u7ae0 abc\u3002\nd",
    "x\u0301 1\u0301 a\u0301b c3PO R2D2 0xFFee I'LL we've",
    "<a href='x'>b c</a>\n<p>1 d 2e\nf3 g</p>",
    '{"a":1,"b":[2.5,"x y","z"],"c":{"d":3}}\n{"e":[[4,5],[6]]},7;8;x;y|z|9\n',
    "1.25,2.5,-3,1e5,abc,d1,2e,f g,h\na;b;c\n| a | b |\n| - | - |\n|c|1|\n\n|d|\n\n\n|e|",
    "\u4ed6\u5728\u90a3\u91cc\uff0c\u770b\u7740\uff1a\u5c71\u3001\u6cb3\u3002\n\n\u4ed6\u8bf4\uff01\n\n\n\u3000\u3000\u4f60\uff1fa\uff0c1\u3002b",
    "\u304b\u306a\u3002\u30ab\u30ca\u3001\u6f22\u5b57\uff1bx\uff0c\u3002\u3042\uff1a1",
    "word " * 12 + "12ab " * 5 + "\nline" * 4,
)


class TextCutter:
    """Splits long texts at points where this does not change their tokens.

    A split rule is used only if no vocabulary token spans its split points, since then no merge can
    span them either. As a further check, splitting a set of sample texts by the rule must not
    change their tokens.

    Args:
        tokenizer: the model's tokenizer.
        usual: target size of a chunk in characters.
        longest: maximum length, in characters, of text without a split point.
    """

    def __init__(
        self, tokenizer: Tokenizer, usual: int = PIECE_CHARACTERS, longest: int = LONGEST_PIECE
    ) -> None:
        self._usual = usual
        self._longest = longest
        rules = _rules(tokenizer)
        self._places = re.compile("|".join(f"(?:{rule.place})" for rule in rules))
        self._has_rules = bool(rules)

    def pieces(self, text: str, is_part: bool = False) -> Iterator[str]:
        """Yield consecutive chunks of the text that can be tokenised separately.

        The concatenated tokens of the chunks are the tokens of the whole text.

        Args:
            text: the text to split.
            is_part: whether the text is part of a larger text. The larger text may be split at
                other points, so the limit for a part is slightly higher. A part is then refused
                only if the larger text would be refused, too.

        Raises:
            UncutText: a chunk would be too long because the text has too few split points.
        """
        start = 0
        longest = self._longest + self._usual if is_part else self._longest
        while len(text) - start > self._usual:
            match = self._next_place(text, start + self._usual, start + longest)
            if match is None:
                break
            yield text[start : match.start()]
            start = match.end()
        if len(text) - start > longest:
            raise UncutText(
                f"it has {len(text)} characters, and this tokenizer takes at most {self._longest}; "
                "shorten it"
            )
        yield text[start:]

    def _next_place(self, text: str, start: int, end: int) -> re.Match[str] | None:
        if not self._has_rules:
            return None
        end = min(len(text), end)
        match = self._places.search(text, start, end)
        if match is None and end < len(text):
            raise UncutText(
                f"no word ends within {self._longest} characters of it; break it up with blanks "
                "or line breaks, or shorten it"
            )
        return match


def _rules(tokenizer: Tokenizer) -> list[_Rule]:
    """Return the rules that are safe for splitting texts with this tokenizer.

    At most one of the rules splits at spaces.
    """
    if not isinstance(tokenizer.model, models.BPE | models.Unigram):
        return []
    if isinstance(tokenizer.model, models.BPE) and tokenizer.model.dropout:
        return []
    vocabulary = list(tokenizer.get_vocab(with_added_tokens=True))
    held = list[_Rule]()
    for rule in _RULES:
        if rule.drops_blank and any(_is_for_blanks(other) for other in held):
            continue
        crossed = re.compile(rule.crossed)
        if not any(crossed.search(text) for text in vocabulary) and _keeps(tokenizer, rule):
            held.append(rule)
    return held


def _is_for_blanks(rule: _Rule) -> bool:
    return " " in rule.place


def _keeps(tokenizer: Tokenizer, rule: _Rule) -> bool:
    """Return whether splitting the sample texts by the rule leaves their tokens unchanged."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for sample in _SAMPLES:
        whole = encode(sample)
        for match in re.finditer(rule.place, sample):
            if encode(sample[: match.start()]) + encode(sample[match.end() :]) != whole:
                return False
    return True
