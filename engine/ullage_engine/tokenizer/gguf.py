"""Rebuilds a byte-level BPE tokenizer, as introduced by GPT-2, from GGUF metadata.

GGUF stores the vocabulary, merges and token types, but only the name of the pre-tokenizer. The
rules below for splitting text are those of each family's published tokenizer.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

from ullage_engine.tokenizer.gguf_file import Value
from ullage_engine.tokenizer.gguf_special_tokens import (
    CONTROL,
    USER_DEFINED,
    end_names,
    special_token_ids,
    token_type,
)


@dataclass(frozen=True)
class _Kind:
    """How a family of byte-level BPE tokenizers splits text into words before merging."""

    split: str = ""
    """Regular expression that matches one word, or "" for GPT-2's expression."""
    single_digits: bool = False
    """Whether every digit becomes a separate word before the expression is applied."""
    whole_words: bool = False
    """Whether a word that is in the vocabulary becomes one token without applying merges."""
    normal_form: Literal["", "NFC"] = ""
    adds_bos: bool = False
    """Whether a beginning-of-sequence token is added if the file does not say."""


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


class UnsupportedTokenizer(Exception):
    """Raised if a GGUF file's metadata describes a tokenizer that cannot be rebuilt.

    The message names the key, its value and the remedy.
    """


def build_tokenizer(metadata: Mapping[str, Value]) -> Tokenizer:
    """Build the tokenizer that the `tokenizer.ggml.*` metadata describes.

    Raises:
        UnsupportedTokenizer: if a key is missing or has a value that is not supported.
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


def _post_processor(
    metadata: Mapping[str, Value], tokenizer: Tokenizer, kind: _Kind
) -> processors.PostProcessor | None:
    """Return the post-processor that adds special tokens to raw text, or None if none are added."""
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
    """Yield the tokens that are never split: control tokens and user-defined tokens.

    Control tokens are skipped when decoding. A token whose name is that of a known end token counts
    as a control token, even if the file declares a different type.
    """
    ends = end_names(metadata)
    for token_id, token in enumerate(tokens):
        kind = token_type(metadata, token_id)
        if token in ends or kind == CONTROL:
            yield AddedToken(token, normalized=False, special=True)
        elif kind == USER_DEFINED:
            yield AddedToken(token, normalized=False, special=False)
