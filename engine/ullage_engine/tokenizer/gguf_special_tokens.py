"""Finds the special tokens in GGUF metadata, including those that end an answer."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ullage_engine.tokenizer.gguf_file import Value

# Token types of GGUF. Tokens of the last two are matched whole in text.
_UNDEFINED = 0
_NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
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
"""Maps the names of special tokens in chat templates to those in `tokenizer.ggml.*_token_id`."""

_ENDS = ("eos", "eot", "eom")
"""Names in `tokenizer.ggml.*_token_id` of the tokens that end a sequence, turn or message."""

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
"""Names of tokens that end an answer, as in llama.cpp.

They are recognised by name, because files with several end tokens often list only one token id.
"""

_NO_ENDS: tuple[tuple[frozenset[str], str], ...] = (
    # gpt-oss and Solar write <|end|> between their messages.
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>"),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>"),
    # Gemma 4 has the end token of its predecessors for another purpose.
    (frozenset({"<|tool_response>"}), "</s>"),
)
"""Exceptions to `END_TOKENS`, as pairs of a set of token names and another token's name.

If a vocabulary has all tokens in the set as end tokens, the other token is not an end token.
"""


def special_token_ids(metadata: Mapping[str, Value]) -> dict[str, int]:
    """Return the ids of special tokens, keyed by the names that chat templates use.

    If a file does not define an end-of-sequence token, the first other end token is used instead.
    """
    ids = {}
    for name, keys in _SPECIAL_TOKENS.items():
        token_ids = _ids(metadata, keys)
        if token_ids:
            ids[name] = token_ids[0]
    ends = end_token_ids(metadata)
    if ends:
        ids.setdefault("eos_token", ends[0])
    return ids


def end_token_ids(metadata: Mapping[str, Value]) -> tuple[int, ...]:
    """Return the ids of all tokens that end generation.

    These are the end-of-sequence, end-of-turn and end-of-message tokens given in the metadata, and
    all tokens that are recognised as end tokens by name.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = end_names(metadata)
    if not isinstance(tokens, list):
        return ()
    # An id may belong to a token that is no end in this vocabulary, or to no token.
    stated = [i for i in _ids(metadata, _ENDS) if i < len(tokens)]
    ends = [i for i in stated if tokens[i] in names or tokens[i] not in END_TOKENS]
    return tuple(dict.fromkeys([*ends, *names.values()]))


def _ids(metadata: Mapping[str, Value], names: Iterable[str]) -> list[int]:
    values = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return [value for value in values if isinstance(value, int)]


def end_names(metadata: Mapping[str, Value]) -> dict[str, int]:
    """Return the end tokens that are recognised by name, with their ids.

    A token that BPE merges can produce is an ordinary word rather than an end token, unless the
    file assigns it a special type. One example is `</s>` in a vocabulary for source code.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return {}

    candidates = {str(token): place for place, token in enumerate(tokens) if token in END_TOKENS}
    plain = {name for name, place in candidates.items() if token_type(metadata, place) in _PLAIN}
    words = _merged(metadata) & plain if plain else frozenset[str]()
    ends = {name: token_id for name, token_id in candidates.items() if name not in words}

    for others, name in _NO_ENDS:
        if others <= ends.keys():
            ends.pop(name, None)
    return ends


def token_type(metadata: Mapping[str, Value], token_id: int) -> Value:
    types = metadata.get("tokenizer.ggml.token_type")
    return types[token_id] if isinstance(types, list) and token_id < len(types) else _NORMAL


def _merged(metadata: Mapping[str, Value]) -> frozenset[str]:
    """Return the `END_TOKENS` names that BPE merges can produce from ordinary text."""
    merges = metadata.get("tokenizer.ggml.merges")
    texts = (str(merge).replace(" ", "", 1) for merge in merges) if isinstance(merges, list) else ()
    return END_TOKENS.intersection(texts)
