"""Batch sampler for GPUs: one copy uploads all parameters, and another downloads all tokens.

Sampling has three phases, so that a caller can do other work in between. `plan_sampling` runs on
the host. `enqueue` launches all GPU work without reading any results. `SampledBatch.read` waits for
the results.

Rows with top-k, top-p or min-p draw from only the `CANDIDATES` likeliest tokens. If a row's filters
keep more tokens than that, the device marks the row, and `read` samples it again from the whole
vocabulary. Either way, the resulting token is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ullage_engine.kernels.staging import upload
from ullage_engine.protocol.step_plan import NO_TOKEN, NOTHING_ALLOWED, Chunk, SampledToken
from ullage_engine.runner.draw import (
    UNSETTLED,
    Draws,
    Row,
    alternatives,
    draw_tokens,
    log_masses,
    plan_draws,
)
from ullage_engine.runner.logits_edits import Edits, PenaltyCounts, edit, plan_edits

CANDIDATES = 1024
"""Number of each row's likeliest tokens that are sorted.

Sorting the whole vocabulary would take a hundred times as much memory.
"""

SORT_ROWS = 8
"""Maximum number of rows whose whole vocabulary is sorted at once, which caps memory use."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Inputs for sampling one token per row, which the host prepares before any GPU work starts.

    Created by `plan_sampling` and used by `enqueue`.
    """

    chunks: Sequence[Chunk]
    counts: PenaltyCounts
    draws: Draws
    edits: Edits
    num_alternatives: int | None
    """Maximum number of alternatives reported for a row. None if no row needs log-probabilities."""


def plan_sampling(
    chunks: Sequence[Chunk], counts: PenaltyCounts, vocab: int, width: int = CANDIDATES
) -> SamplingPlan:
    """Plan the sampling of one token for each chunk.

    Args:
        chunks: chunks to sample. All have sampling parameters.
        counts: token counts of the requests with penalties.
        vocab: size of the vocabulary.
        width: number of candidate tokens for rows with top-k, top-p or min-p.
    """
    params = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
    rows = [Row(each, chunk.end) for each, chunk in zip(params, chunks, strict=True)]
    reported = [each.top_logprobs for each in params if each.top_logprobs is not None]
    return SamplingPlan(
        chunks=chunks,
        counts=counts,
        draws=plan_draws(rows, min(width, vocab)),
        edits=plan_edits(chunks, counts, vocab),
        num_alternatives=min(max(reported), vocab) if reported else None,
    )


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """A batch of sampled tokens that the device is still computing."""

    plan: SamplingPlan
    computed: torch.Tensor
    """The model's logits [rows, vocab], which must stay unchanged until `read`."""
    result: torch.Tensor
    """Integers [rows, columns] on the device.

    The first column is the token, `NO_TOKEN`, `NOTHING_ALLOWED` or `UNSETTLED`. If
    log-probabilities are reported, the next columns are the token's log-probability, the
    alternatives' ids and the alternatives' log-probabilities.
    """

    def read(self) -> list[SampledToken]:
        """Wait for the tokens, and return them in the order of the chunks."""
        table = self.result.cpu().numpy()
        sampled = [
            self._sampled(chunk, row) for chunk, row in zip(self.plan.chunks, table, strict=True)
        ]
        unsettled = [int(row) for row in np.flatnonzero(table[:, 0] == UNSETTLED)]
        for start in range(0, len(unsettled), SORT_ROWS):
            rows = unsettled[start : start + SORT_ROWS]
            for row, token in zip(rows, self._sample_again(rows), strict=True):
                sampled[row] = token
        return sampled

    def _sampled(self, chunk: Chunk, row: np.ndarray) -> SampledToken:
        token = int(row[0])
        top = chunk.sampling.top_logprobs if chunk.sampling else None
        if token < 0 or top is None or self.plan.num_alternatives is None:
            return SampledToken(chunk.request_id, token, 0.0, [], [])
        ids, logprobs = row[2:].reshape(2, self.plan.num_alternatives)[:, :top]
        return SampledToken(
            chunk.request_id,
            token,
            float(row[1:2].view(np.float32)[0]),
            ids.tolist(),
            logprobs.view(np.float32).tolist(),
        )

    def _sample_again(self, rows: list[int]) -> list[SampledToken]:
        computed = torch.stack([self.computed[row] for row in rows])
        chunks = [self.plan.chunks[row] for row in rows]
        vocab = computed.shape[1]
        plan = plan_sampling(chunks, self.plan.counts, vocab, width=vocab)
        return enqueue(computed, computed.to(torch.float32, copy=True), plan).read()


def enqueue(computed: torch.Tensor, logits: torch.Tensor, plan: SamplingPlan) -> SampledBatch:
    """Launch the sampling of one token per row, without waiting for the device.

    Args:
        computed: logits [rows, vocab], which are not changed.
        logits: contiguous copy of the logits in float32, which is overwritten.
        plan: result of `plan_sampling`.
    """
    # Nothing below may read a value of the device, not even to decide which kernel comes next.
    on_device = upload({**plan.draws.arrays, **plan.edits.arrays}, logits.device)
    least, greatest = torch.aminmax(logits, dim=-1, keepdim=True)
    # Each product is 0, or NaN if its factor is NaN or infinite, which equals nothing.
    is_damaged = least * 0 != greatest * 0

    edit(logits, plan.edits, on_device)
    draw_arrays = {name: on_device[name] for name in plan.draws.arrays}
    # Computed before the draw, which overwrites the logits.
    is_empty = logits.amax(-1, keepdim=True) == -torch.inf if plan.edits.rules_out else None
    tokens = draw_tokens(logits, plan.draws, draw_arrays)
    if is_empty is not None:
        tokens.masked_fill_(is_empty, NOTHING_ALLOWED)
    tokens.masked_fill_(is_damaged, NO_TOKEN)
    if plan.num_alternatives is None:
        return SampledBatch(plan, computed, tokens)

    logits.copy_(computed)
    columns = [tokens, *logprob_columns(logits, greatest, tokens, plan.num_alternatives)]
    return SampledBatch(plan, computed, torch.cat([_as_int32(each) for each in columns], 1))


def logprob_columns(
    logits: torch.Tensor, greatest: torch.Tensor, tokens: torch.Tensor, num_alternatives: int
) -> list[torch.Tensor]:
    """Return log-probabilities of the model's own distribution, before edits and temperature.

    The logits are overwritten.

    Returns:
        Log-probabilities of the tokens [rows, 1], ids of the alternatives, and log-probabilities of
        the alternatives.
    """
    chosen = logits.gather(1, tokens.clamp(min=0))
    values, ids = alternatives(logits, num_alternatives)
    log_mass = log_masses(logits, greatest)
    return [chosen - greatest - log_mass, ids, values - greatest - log_mass]


def _as_int32(column: torch.Tensor) -> torch.Tensor:
    """Return integers as int32, and float32 values reinterpreted bit by bit as int32."""
    return column.view(torch.int32) if column.is_floating_point() else column.int()
