"""Truncates prompts (`truncate_prompt_tokens`), to the tokens that vLLM keeps."""

from collections.abc import Sequence
from typing import TypeVar

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.affixes import Affixes
from ullage_common.wire.validation import invalid_value

Tokens = TypeVar("Tokens", bound=Sequence[int])


def truncated(
    token_ids: Tokens,
    request: inference_pb2.GenerateRequest,
    max_model_len: int,
    affixes: Affixes,
) -> Tokens:
    """Return the tokens of a prompt that the request keeps.

    An answer follows the prompt's last tokens, so these are kept. An embedding is that of the first
    tokens, between the special tokens with which the model was trained.

    Args:
        token_ids: the whole prompt.
        request: the request. Its limit is -1 for what fits the context beside the answer.
        max_model_len: maximum number of tokens in a prompt and its answer together.
        affixes: the tokens that the tokenizer puts around text.

    Raises:
        ServiceError: the limit leaves no token of the text.
    """
    most = request.truncate_prompt_tokens
    if not most:
        return token_ids
    if request.embed:
        return _first_tokens(token_ids, request, max_model_len if most < 0 else most, affixes)
    if most < 0:
        output = request.stop.max_tokens if request.stop.HasField("max_tokens") else 1
        most = max(1, max_model_len - output)
    return token_ids[-most:]  # type: ignore[return-value]


def _first_tokens(
    token_ids: Tokens, request: inference_pb2.GenerateRequest, most: int, affixes: Affixes
) -> Tokens:
    if len(token_ids) <= most:
        return token_ids
    if request.WhichOneof("input") != "text" or request.omit_special_tokens:
        return token_ids[:most]  # type: ignore[return-value]

    num_around = len(affixes.prefix) + len(affixes.suffix)
    if most <= num_around:
        permitted = f"-1, or at least {num_around + 1}, since {num_around} tokens enclose a text"
        raise invalid_value("truncate_prompt_tokens", most, permitted)
    num_suffix = len(affixes.suffix)
    suffix = token_ids[len(token_ids) - num_suffix :]
    return token_ids[: most - num_suffix] + suffix  # type: ignore[operator, no-any-return]
