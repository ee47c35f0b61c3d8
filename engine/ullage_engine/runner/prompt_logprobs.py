"""Log-probabilities of prompt tokens, computed from the logits of a few rows at a time.

Logits of a whole chunk would take tokens * vocabulary * 4 bytes, which no reservation covers. The
rows are therefore computed in the buffer of the sampler, and only the numbers that are reported
leave it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.kernels.staging import upload
from ullage_engine.native.library import Team
from ullage_engine.protocol.requests import PromptLogprobs
from ullage_engine.runner.batched_sampler import logprob_columns
from ullage_engine.runner.draw import alternatives
from ullage_engine.runner.sampler import row_logprobs


class ScoredRows(NamedTuple):
    """The numbers to report for some rows, each of which scores the token that follows it."""

    logprobs: npt.NDArray[np.float32]
    """[rows, 1 + alternatives]: log-probabilities of the token, and of the alternatives."""
    top_ids: npt.NDArray[np.int32]
    """[rows, alternatives]"""
    ranks: npt.NDArray[np.int32]
    """[rows]: 1 plus the number of tokens that are likelier."""


def score_rows(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_alternatives: int,
    team: Team | None = None,
    computed: torch.Tensor | None = None,
) -> ScoredRows:
    """Return the log-probabilities of one token a row, by the arithmetic of sampled tokens.

    Args:
        logits: float32 [rows, vocab], which are overwritten.
        token_ids: the token of each row.
        num_alternatives: number of likeliest tokens to report for each row.
        team: threads of the C++ library, or None if torch computes.
        computed: the logits as computed, in any dtype. Needed on GPUs only.
    """
    if logits.device.type == "cpu":
        return _score_on_cpu(logits, token_ids, num_alternatives, team)
    assert computed is not None, "the logits are overwritten, and needed twice"
    return score_on_device(logits, token_ids, num_alternatives, computed)


def score_on_device(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int, computed: torch.Tensor
) -> ScoredRows:
    """Score rows with a fixed number of kernels, as GPUs do. See `score_rows`."""
    targets = upload({"targets": np.array(token_ids, np.int64)[:, None]}, logits.device)["targets"]
    greatest = logits.amax(-1, keepdim=True)
    own, top_ids, top = logprob_columns(logits, greatest, targets, num_alternatives)

    # Counted in the buffer, since a mask of its size would have to be allocated.
    logits.copy_(computed)
    likelier = logits.gt_(logits.gather(1, targets)).sum(-1)
    return ScoredRows(
        torch.cat([own, top], 1).cpu().numpy(),
        top_ids.int().cpu().numpy(),
        1 + likelier.int().cpu().numpy(),
    )


def _score_on_cpu(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int, team: Team | None
) -> ScoredRows:
    rows = len(token_ids)
    scored = ScoredRows(
        np.empty((rows, 1 + num_alternatives), np.float32),
        np.empty((rows, num_alternatives), np.int32),
        np.empty(rows, np.int32),
    )
    for index, token in enumerate(token_ids):
        row = logits[index : index + 1]
        logprobs = row_logprobs(row, team).numpy()
        _, ids = alternatives(row, num_alternatives)
        top_ids = ids[0].numpy()

        scored.logprobs[index, 0] = logprobs[token]
        scored.logprobs[index, 1:] = logprobs[top_ids]
        scored.top_ids[index] = top_ids
        scored.ranks[index] = 1 + np.count_nonzero(row.numpy() > row[0, token].item())
    return scored


def as_message(request_id: str, start: int, parts: Sequence[ScoredRows]) -> PromptLogprobs:
    """Return the message with consecutive rows. The first row scores position `start`."""
    logprobs, top_ids, ranks = (np.concatenate(each) for each in zip(*parts, strict=True))
    return PromptLogprobs(
        request_id,
        start,
        logprobs.astype("<f4").tobytes(),
        top_ids.astype("<i4").tobytes(),
        ranks.astype("<i4").tobytes(),
    )
