"""What a request says of single tokens: biases added to their logits, tokens ruled out."""

import numpy as np
import torch

from ullage_engine.core.plan import Chunk


def constrain(logits: torch.Tensor, chunk: Chunk) -> None:
    """Applies a chunk's biases and masks to its row of logits [vocab], in place.

    A token that is ruled out has the logit -inf and so no probability at any temperature.
    """
    bias = chunk.sampling.logit_bias if chunk.sampling else {}
    if bias:
        values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(list(bias), logits)] += values
    if chunk.banned:
        logits[_ids(chunk.banned, logits)] = -torch.inf
    if chunk.allowed is not None:
        ruled_out = _ruled_out(chunk.allowed, logits.shape[0])
        logits.masked_fill_(ruled_out.to(logits.device), -torch.inf)


def is_constrained(chunk: Chunk) -> bool:
    """Whether `constrain` changes anything."""
    is_biased = chunk.sampling is not None and bool(chunk.sampling.logit_bias)
    return chunk.allowed is not None or bool(chunk.banned) or is_biased


def _ids(token_ids: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(token_ids, device=like.device)


def _ruled_out(allowed: bytes, vocab: int) -> torch.Tensor:
    """[vocab], true for tokens without a bit in the mask."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=vocab, bitorder="little")
    return torch.from_numpy(bits == 0)
