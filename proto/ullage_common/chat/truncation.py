"""Truncates prompts to their last tokens (`truncate_prompt_tokens`)."""

from collections.abc import Sequence
from typing import TypeVar

from ullage.inference.v1 import inference_pb2

Tokens = TypeVar("Tokens", bound=Sequence[int])


def truncated(
    token_ids: Tokens, request: inference_pb2.GenerateRequest, max_model_len: int
) -> Tokens:
    """Return the last tokens of a prompt, as many as the request keeps.

    Args:
        token_ids: the whole prompt.
        request: the request. Its limit is -1 for what fits the context beside the answer.
        max_model_len: maximum number of tokens in a prompt and its answer together.
    """
    most = request.truncate_prompt_tokens
    if not most:
        return token_ids
    if most < 0:
        output = request.stop.max_tokens if request.stop.HasField("max_tokens") else 1
        most = max(1, max_model_len - output)
    return token_ids[-most:]  # type: ignore[return-value]
