"""Rebuilds a `tokenizers.Tokenizer` from GGUF metadata: byte-level BPE, as GPT-2 introduced it.

GGUF stores vocabulary, merges and token types, but of the pre-tokenizer only a name; the splits
below are those that the published tokenizer.json of each family carries. The file's key-value
header is read without numpy and without touching a tensor: magic `GGUF`, version (uint32), tensor
count and pair count (uint64), then pairs of (string key, uint32 type, value); a string is a uint64
length and UTF-8 bytes; an array is a uint32 element type, a uint64 count and its elements;
everything little-endian.
"""

import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

Value = int | float | bool | str | list["Value"]


class GgufError(Exception):
    """The file is not a GGUF file that can be read; one line that names it."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Read all key-value pairs of a GGUF file.

    Raises:
        GgufError: the file is missing, is no GGUF file, or ends inside its header.
    """
    with _opened(path) as reader:
        return dict(reader.pairs())


def read_architecture(path: Path) -> Value | None:
    """Reads which architecture a GGUF file names, of its header no more than up to there.

    Raises:
        GgufError: as `read_metadata`.
    """
    with _opened(path) as reader:
        pairs = reader.pairs()
        return next((value for key, value in pairs if key == "general.architecture"), None)


@contextmanager
def _opened(path: Path) -> Iterator["_Reader"]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(data)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}; name an existing GGUF file") from error
    except (struct.error, IndexError, ValueError) as error:
        # ValueError is also what mapping an empty file raises.
        raise GgufError(f"{path}: not a whole GGUF file ({error}); fetch it again") from error


class _Reader:
    """A cursor over the mapped file; running off its end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self) -> Iterator[tuple[str, Value]]:
        if self._take(4) != MAGIC:
            raise ValueError("the file does not begin with GGUF")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version}; versions {SUPPORTED_VERSIONS} are supported")
        self._scalar("Q")  # tensors, described after the pairs
        for _ in range(int(self._scalar("Q"))):
            yield self._pair()

    def _pair(self) -> tuple[str, Value]:
        key = self._string()
        return key, self._value(int(self._scalar("I")))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_format_of(kind))

    def _array(self) -> list[Value]:
        kind = int(self._scalar("I"))
        count = int(self._scalar("Q"))
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(kind) for _ in range(count)]
        layout = f"<{count}{_format_of(kind)}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[Value]:
        """Read many strings; a vocabulary and its merges are 100,000 of them."""
        data = self._data
        at = self._at
        texts = list[Value]()
        for _ in range(count):
            [size] = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            text = data[at : at + size]
            if len(text) < size:
                raise IndexError(f"the header needs {at + size} bytes, the file has {len(data)}")
            texts.append(text.decode("utf-8", "replace"))
            at += size
        self._at = at
        return texts

    def _scalar(self, layout: str) -> int | float | bool:
        size = struct.calcsize("<" + layout)
        value: int | float | bool = struct.unpack("<" + layout, self._take(size))[0]
        return value

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise IndexError(f"the header needs {end} bytes, the file has {len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken


_SIZE = struct.Struct("<Q")


def _format_of(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


# Token types of GGUF. The last two are matched whole in text.
_UNDEFINED = 0
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_PLAIN = (_UNDEFINED, _NORMAL)

_SPECIAL_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bos_token": ("bos",),
        "eos_token": ("eos",),
        "unk_token": ("unknown",),
        "sep_token": ("separator", "seperator"),
        "pad_token": ("padding",),
        "cls_token": ("cls",),
        "mask_token": ("mask",),
    }
)
"""Names of special tokens in chat templates, with those that `tokenizer.ggml.*_token_id` has."""

_ENDS = ("eos", "eot", "eom")

END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<eos>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Tokens that end an answer by their names, as in llama.cpp: many files name one end of several."""

_NO_ENDS: tuple[tuple[frozenset[str], str], ...] = (
    # gpt-oss writes the first between its messages, and so does Solar.
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>"),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>"),
    # Gemma 4 keeps the token of its forebears for something else.
    (frozenset({"<|tool_response>"}), "</s>"),
)
"""Sets of names beside which another name is no end."""


class UnsupportedTokenizer(Exception):
    """The metadata describe a tokenizer that cannot be rebuilt; names key, value and remedy."""


@dataclass(frozen=True)
class _Kind:
    """The way in which a family of byte-level BPE tokenizers splits text before merging."""

    split: str = ""
    """Regular expression of one piece; empty: GPT-2's own."""
    single_digits: bool = False
    """Whether every digit is its own piece, cut off before the split."""
    whole_words: bool = False
    """Whether a piece that is in the vocabulary is taken whole, without merging."""
    normal_form: Literal["", "NFC"] = ""
    adds_bos: bool = False
    """Whether a file that does not say begins text with its beginning-of-sequence token."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = _Kind()
_SMOLLM = _Kind(single_digits=True)
_LLAMA3 = _Kind(
    split=_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL, whole_words=True, adds_bos=True
)
_QWEN2 = _Kind(split=_CONTRACTIONS + _WORD + r"|\p{N}" + _TAIL, normal_form="NFC")

_KINDS: Mapping[str, _Kind] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_tokenizer(metadata: Mapping[str, Value]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` pairs describe.

    Raises:
        UnsupportedTokenizer: a pair is missing or has a value that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedTokenizer(_refusal("tokenizer.ggml.model", model, ["gpt2"]))
    kind = _kind(metadata)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(tokens, _strings(metadata, "tokenizer.ggml.merges"), kind))
    if kind.normal_form:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    added = list(_added_tokens(metadata, tokens))
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if processor := _post_processor(metadata, tokenizer, kind):
        tokenizer.post_processor = processor
    return tokenizer


def special_token_ids(metadata: Mapping[str, Value]) -> dict[str, int]:
    """Return ids of special tokens by the names that chat templates have for them.

    A file that names no end-of-sequence token has the first of its other ends for it.
    """
    found = {}
    for name, keys in _SPECIAL_TOKENS.items():
        token_ids = _ids(metadata, keys)
        if token_ids:
            found[name] = token_ids[0]
    ends = end_token_ids(metadata)
    if ends:
        found.setdefault("eos_token", ends[0])
    return found


def end_token_ids(metadata: Mapping[str, Value]) -> tuple[int, ...]:
    """Return the tokens that end generation: those that the metadata name as ends of sequence, turn
    and message, and others by their known names."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = _end_names(metadata)
    if not isinstance(tokens, list):
        return ()
    # An id may be of a token that is no end beside others, or of none at all.
    stated = [i for i in _ids(metadata, _ENDS) if i < len(tokens)]
    ends = [i for i in stated if tokens[i] in names or tokens[i] not in END_TOKENS]
    return tuple(dict.fromkeys([*ends, *names.values()]))


def _ids(metadata: Mapping[str, Value], names: Iterable[str]) -> list[int]:
    values = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return [value for value in values if isinstance(value, int)]


def _end_names(metadata: Mapping[str, Value]) -> dict[str, int]:
    """Return tokens with names of ends, and their ids.

    A name that merges make is a word of the text, as `</s>` may be in a vocabulary of source code,
    unless the file gives it a type of its own.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return {}
    found = {str(token): place for place, token in enumerate(tokens) if token in END_TOKENS}
    plain = {name for name, place in found.items() if _type(metadata, place) in _PLAIN}
    words = _merged(metadata) & plain if plain else frozenset[str]()
    ends = {name: token_id for name, token_id in found.items() if name not in words}
    for beside, name in _NO_ENDS:
        if beside <= ends.keys():
            ends.pop(name, None)
    return ends


def _type(metadata: Mapping[str, Value], token_id: int) -> Value:
    types = metadata.get("tokenizer.ggml.token_type")
    return types[token_id] if isinstance(types, list) and token_id < len(types) else _NORMAL


def _merged(metadata: Mapping[str, Value]) -> frozenset[str]:
    """Return the names of ends that merges make."""
    merges = metadata.get("tokenizer.ggml.merges")
    texts = (str(merge).replace(" ", "", 1) for merge in merges) if isinstance(merges, list) else ()
    return END_TOKENS.intersection(texts)


def _post_processor(
    metadata: Mapping[str, Value], tokenizer: Tokenizer, kind: _Kind
) -> processors.PostProcessor | None:
    """Make what puts special tokens around raw text; None where none are."""
    special = special_token_ids(metadata)
    added = {
        "bos_token": _flag(metadata, "tokenizer.ggml.add_bos_token", kind.adds_bos),
        "eos_token": _flag(metadata, "tokenizer.ggml.add_eos_token", False),
    }
    texts = {
        name: tokenizer.id_to_token(special[name])
        for name, is_added in added.items()
        if is_added and name in special
    }
    if not any(texts.values()):
        return None
    parts = [texts.get("bos_token"), "$A", texts.get("eos_token")]
    return processors.TemplateProcessing(
        single=[part for part in parts if part],
        special_tokens=[(text, special[name]) for name, text in texts.items() if text],
    )


def _flag(metadata: Mapping[str, Value], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise UnsupportedTokenizer(
            f"{key} is {value!r}, not true or false; convert the model to GGUF again"
        )
    return value


def _kind(metadata: Mapping[str, Value]) -> _Kind:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _KINDS:
        raise UnsupportedTokenizer(_refusal("tokenizer.ggml.pre", name, sorted(_KINDS)))
    return _KINDS[str(name)]


def _refusal(key: str, value: object, supported: list[str]) -> str:
    return (
        f"{key} is {value!r}; supported: {', '.join(supported)}; "
        "serve the model from a directory with a tokenizer.json instead"
    )


def _strings(metadata: Mapping[str, Value], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise UnsupportedTokenizer(f"{key} is missing; convert the model to GGUF again")
    return [str(item) for item in value]


def _bpe(tokens: list[str], merges: list[str], kind: _Kind) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind.whole_words)
    except Exception as error:  # the Rust library raises plain Exception
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.merges do not fit the vocabulary ({error}); "
            "convert the model to GGUF again"
        ) from error


def _pre_tokenizer(kind: _Kind) -> pre_tokenizers.PreTokenizer:
    if kind.split:
        cut = pre_tokenizers.Split(Regex(kind.split), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, bytes_only])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _added_tokens(metadata: Mapping[str, Value], tokens: list[str]) -> Iterator[AddedToken]:
    """Yield tokens matched whole in text: control tokens, left out when decoding, and user-defined.

    Ends by their names are control tokens, whatever type the file gives them.
    """
    ends = _end_names(metadata)
    for token_id, token in enumerate(tokens):
        kind = _type(metadata, token_id)
        if token in ends or kind == _CONTROL:
            yield AddedToken(token, normalized=False, special=True)
        elif kind == _USER_DEFINED:
            yield AddedToken(token, normalized=False, special=False)
