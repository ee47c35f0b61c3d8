"""The sampler, which chooses the next token of each row of logits.

Sampling is batch-invariant: a row's token depends on that row alone. The random number for each
token is a pure function of seed and position, so a resumed request draws the same tokens. The steps
are, in this order: penalties, biases and banned tokens, masks, temperature, and the filters top-k,
top-p (over the tokens that top-k keeps) and min-p.

A GPU samples a whole batch at once (`batched_sampler`). On a CPU, rows are edited one by one and
the C++ library chooses the tokens. Without the library, `draw` chooses them, as on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ullage_engine.kernels.staging import upload
from ullage_engine.native.library import Team
from ullage_engine.protocol.step_plan import NO_TOKEN, NOTHING_ALLOWED, Chunk, SampledToken
from ullage_engine.runner.batched_sampler import SORT_ROWS, enqueue, plan_sampling
from ullage_engine.runner.draw import UNSETTLED, Row, alternatives, draw_tokens, plan_draws
from ullage_engine.runner.logits_edits import PenaltyCounts, constrain, is_constrained, penalise

CANDIDATES = (128, 1024)
"""Numbers of candidate tokens that a CPU tries, in order, before it sorts the whole vocabulary.

Sorting 49,152 logits takes 3.2 ms per row. Finding the 128 likeliest tokens takes 0.06 ms.
"""


def sample(
    logits: torch.Tensor,
    chunks: Sequence[Chunk],
    counts: PenaltyCounts | None = None,
    likeliest: Sequence[int] | None = None,
    team: Team | None = None,
    computed: torch.Tensor | None = None,
) -> list[SampledToken]:
    """Sample a token for each row of logits.

    A row with NaN or infinite logits gets `NO_TOKEN`, because such logits come from damaged weights
    or a faulty kernel. If all of a row's tokens are ruled out, it gets `NOTHING_ALLOWED`.

    Args:
        logits: float32 [rows, vocab], which are overwritten.
        chunks: chunk of each row.
        counts: token counts from the requests' earlier steps. None to recount the histories.
        likeliest: likeliest token of each row (the first one if tied), or -1 if a logit is not
            finite. None if it is not known yet.
        team: threads of the C++ library, which choose tokens on a CPU. None if torch chooses.
        computed: the logits as computed, in any dtype, which are not overwritten. They are used
            only on GPUs. None to make a copy of `logits` instead.
    """
    counts = counts or PenaltyCounts(len(chunks))
    if logits.device.type != "cpu":
        plan = plan_sampling(chunks, counts, logits.shape[1])
        return enqueue(logits.clone() if computed is None else computed, logits, plan).read()
    return _sample_on_cpu(logits, chunks, counts, likeliest, team)


def _sample_on_cpu(
    logits: torch.Tensor,
    chunks: Sequence[Chunk],
    counts: PenaltyCounts,
    likeliest: Sequence[int] | None,
    team: Team | None,
) -> list[SampledToken]:
    rows = [Row(chunk.sampling, chunk.end) for chunk in chunks if chunk.sampling is not None]
    if likeliest is not None and all(map(_takes_likeliest, rows, chunks)):
        return [
            SampledToken(chunk.request_id, NO_TOKEN if token < 0 else token, 0.0, [], [])
            for chunk, token in zip(chunks, likeliest, strict=True)
        ]

    if likeliest is not None:
        damaged = [index for index, token in enumerate(likeliest) if token < 0]
    else:
        damaged = _damaged_rows(logits)
    if damaged:
        # Zeros are valid logits, so that the code below needs no case for damaged rows.
        logits[damaged] = 0.0

    # Log-probabilities are the model's own, so they are computed before any edit.
    raw = _raw_logprobs(logits, rows, team)
    for index, row in enumerate(rows):
        if row.params.is_penalised:
            penalise(logits[index], row.params, counts.of(chunks[index]))
    for row_logits, chunk in zip(logits, chunks, strict=True):
        if is_constrained(chunk):
            constrain(row_logits, chunk)

    tokens = choose(logits, rows, team)
    for index in damaged:
        tokens[index] = NO_TOKEN
    return [
        _sampled(chunk.request_id, token, raw.get(index))
        for index, (chunk, token) in enumerate(zip(chunks, tokens, strict=True))
    ]


def _takes_likeliest(row: Row, chunk: Chunk) -> bool:
    """Return whether a row simply gets the likeliest token.

    This is the case if the row is greedy and needs neither edits nor log-probabilities.
    """
    params = row.params
    is_asked_alone = params.top_logprobs is None and not params.is_penalised
    return row.is_greedy and is_asked_alone and not is_constrained(chunk)


def _damaged_rows(logits: torch.Tensor) -> list[int]:
    """Return the rows with NaN or infinite logits."""
    # A row has one if its least or greatest logit is one. NumPy's reductions over rows take a tenth
    # of torch's time.
    rows = logits.numpy()
    is_finite = np.isfinite(rows.min(-1)) & np.isfinite(rows.max(-1))
    return [int(index) for index in np.flatnonzero(~is_finite)]


def _sampled(request_id: str, token: int, raw: "_RawLogprobs | None") -> SampledToken:
    if raw is None or token < 0:
        return SampledToken(request_id, token, 0.0, [], [])
    logprob = float(raw.logprobs[token])
    return SampledToken(request_id, token, logprob, raw.top_ids, raw.top_logprobs)


@dataclass(frozen=True, slots=True)
class _RawLogprobs:
    """Log-probabilities of one row, before penalties and temperature."""

    logprobs: torch.Tensor  # [vocab]
    top_ids: list[int]
    top_logprobs: list[float]


def _raw_logprobs(
    logits: torch.Tensor, rows: Sequence[Row], team: Team | None
) -> dict[int, _RawLogprobs]:
    """Return the model's own log-probabilities, by row index, for rows that must report them.

    Beam searches and best-of ranking compare log-probabilities, so the C++ library computes them
    bit-identically on every processor.
    """
    by_row = {}
    for index, row in enumerate(rows):
        if row.params.top_logprobs is None:
            continue
        logprobs = row_logprobs(logits[index : index + 1], team)
        _, ids = alternatives(logits[index : index + 1], row.params.top_logprobs)
        by_row[index] = _RawLogprobs(logprobs, ids[0].tolist(), logprobs[ids[0]].tolist())
    return by_row


def row_logprobs(logits: torch.Tensor, team: Team | None) -> torch.Tensor:
    """Return the log-probabilities [vocab] of one row of logits, float32 [1, vocab]."""
    row = logits[0]
    if team is None:
        return torch.log_softmax(row, dim=-1)
    return (row - row.amax()).sub_(team.log_masses(logits)[0])


def choose(logits: torch.Tensor, rows: Sequence[Row], team: Team | None = None) -> list[int]:
    """Choose the next token of each row of edited logits.

    The threads of `team` choose the tokens. Without a team, torch chooses them. A row without a
    logit above -inf gets `NOTHING_ALLOWED`.
    """
    if team is None:
        return _choose_with_torch(logits, rows)
    tokens = team.sample(logits, [row.draw() for row in rows])
    return [NOTHING_ALLOWED if token < 0 else token for token in tokens]


def _choose_with_torch(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    ruled_out = [int(index) for index in np.flatnonzero(logits.numpy().max(-1) == -np.inf)]
    greedy = [index for index, row in enumerate(rows) if row.is_greedy]
    tokens = dict(zip(greedy, _likeliest_ids(logits[greedy]), strict=True)) if greedy else {}

    # Free and filtered rows are drawn apart, since each kind takes work that the other does not
    # need.
    free = [index for index, row in enumerate(rows) if row.is_free]
    filtered = [index for index, row in enumerate(rows) if row.is_filtered]
    for pending in (free, filtered):
        for width in (*CANDIDATES, logits.shape[1]):
            tokens |= _draw_rows(logits, rows, pending, width)
            pending = [index for index in pending if tokens[index] == UNSETTLED]

    tokens |= dict.fromkeys(ruled_out, NOTHING_ALLOWED)
    return [tokens[index] for index in range(len(rows))]


def _likeliest_ids(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row, or the first one if several tie."""
    return [int(token) for token in logits.numpy().argmax(-1)]


def _draw_rows(
    logits: torch.Tensor, rows: Sequence[Row], indices: list[int], width: int
) -> dict[int, int]:
    """Draw a token for each of these rows, and return the tokens by row index.

    Filtered rows draw from their `width` likeliest tokens (the candidates). If a row's filters keep
    more tokens than there are candidates, its token is `UNSETTLED`.
    """
    tokens: dict[int, int] = {}
    for start in range(0, len(indices), SORT_ROWS):
        batch = indices[start : start + SORT_ROWS]
        draws = plan_draws([rows[index] for index in batch], min(width, logits.shape[1]))
        drawn = draw_tokens(logits[batch], draws, upload(draws.arrays, logits.device))
        tokens |= zip(batch, drawn[:, 0].tolist(), strict=True)
    return tokens
