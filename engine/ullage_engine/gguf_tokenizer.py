"""A `tokenizers.Tokenizer` rebuilt from GGUF metadata: byte-level BPE, as GPT-2 introduced it.

GGUF stores vocabulary, merges and token types, but of the pre-tokenizer only a name; the splits
below are those that the published tokenizer.json of each family carries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ullage_engine.gguf_metadata import Value

# Token types of GGUF that are matched whole in text.
_CONTROL, _USER_DEFINED = 3, 4


class UnsupportedTokenizer(Exception):
    """The metadata describe a tokenizer that cannot be rebuilt; names key, value and remedy."""


@dataclass(frozen=True)
class _Kind:
    """How a family of byte-level BPE tokenizers splits text before merging."""

    split: str = ""
    """Regular expression of one piece; empty: GPT-2's own."""
    single_digits: bool = False
    """Every digit is its own piece, cut off before the split."""
    whole_words: bool = False
    """A piece that is in the vocabulary is taken whole, without merging."""
    normal_form: Literal["", "NFC"] = ""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = _Kind()
_SMOLLM = _Kind(single_digits=True)
_LLAMA3 = _Kind(split=_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL, whole_words=True)
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
    added = list(_added_tokens(tokens, metadata.get("tokenizer.ggml.token_type")))
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


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
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
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


def _added_tokens(tokens: list[str], types: Value | None) -> Iterator[AddedToken]:
    """Tokens matched whole in text: control tokens, left out when decoding, and user-defined."""
    for token, kind in zip(tokens, types if isinstance(types, list) else (), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            yield AddedToken(token, normalized=False, special=kind == _CONTROL)
