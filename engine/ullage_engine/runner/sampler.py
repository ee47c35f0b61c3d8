"""Samples the next token of each row of logits.

Everything about a row depends on that row alone, so a request's tokens do not depend on the batch;
noise is a pure function of seed and position, so a resumed request draws what it would have drawn.
Order: penalties, biases and banned tokens, masks, temperature, then the filters: top-k, top-p over
what top-k kept, min-p. All three keep a prefix of the tokens sorted by (logit descending, id
ascending).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ullage_engine.native.library import Draw, Team
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import NO_TOKEN, Chunk, SampledToken

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Draws a number in (0, 1) for the token at `position` of a request with this seed.

    Two rounds of SplitMix64 (Steele, Lea and Flood, 2014) over the pair; 23 bits, so that it and
    its distance from 1 are exact in float32.
    """
    mixed = _mix((_mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (position + 1)) & _MASK)
    return ((mixed >> 41) + 0.5) / (1 << 23)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def constrain(logits: torch.Tensor, chunk: Chunk) -> None:
    """Applies a chunk's biases and masks to its row of logits [vocab], in place.

    A token that is ruled out has the logit -inf and so no probability at any temperature.
    """
    bias = chunk.sampling.logit_bias if chunk.sampling else {}
    if bias:
        values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_allowed_ids(list(bias), logits)] += values
    if chunk.banned:
        logits[_allowed_ids(chunk.banned, logits)] = -torch.inf
    if chunk.allowed is not None:
        ruled_out = _ruled_out(chunk.allowed, logits.shape[0])
        logits.masked_fill_(ruled_out.to(logits.device), -torch.inf)


def is_constrained(chunk: Chunk) -> bool:
    """Whether `constrain` changes anything."""
    is_biased = chunk.sampling is not None and bool(chunk.sampling.logit_bias)
    return chunk.allowed is not None or bool(chunk.banned) or is_biased


def _allowed_ids(token_ids: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(token_ids, device=like.device)


def _ruled_out(allowed: bytes, vocab: int) -> torch.Tensor:
    """Returns [vocab], true for tokens without a bit in the mask."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=vocab, bitorder="little")
    return torch.from_numpy(bits == 0)


SORT_ROWS = 8
"""Rows sorted at once, which bounds the temporaries."""

CANDIDATES = (128, 1024)
"""Number of likeliest tokens that are tried before the whole vocabulary is sorted: sorting 49,152
logits takes 3.2 ms a row, finding the 128 likeliest 0.06."""

LARGEST = 1e30
"""Stand-in for an infinite logit: far beyond any other, and sums with it stay finite."""


@dataclass(frozen=True, slots=True)
class Row:
    """The sampling parameters of one row."""

    params: SamplingParams
    position: int
    """Position of the token to choose."""

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0 or self.params.top_k == 1

    @property
    def is_filtered(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    def draw(self) -> Draw:
        """Returns what the C++ library chooses by."""
        params = self.params
        return Draw(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            noise=0.0 if self.is_greedy else uniform(params.seed, self.position),
            top_k=params.top_k,
        )


def sample(
    logits: torch.Tensor,
    chunks: Sequence[Chunk],
    counts: "PenaltyCounts | None" = None,
    likeliest: Sequence[int] | None = None,
    team: Team | None = None,
) -> list[SampledToken]:
    """Samples a token a row of float32 logits [rows, vocab], which penalties change in place.

    `counts` spares counting a history again in each of a request's steps. `likeliest`: the
    likeliest token of each row, the first of equals, -1 where not all of the row is finite; without
    it that is looked for here. `team`: the C++ library's threads, which choose if they are given.

    A row with a NaN or an infinity, which damaged weights or a wrong kernel give, has `NO_TOKEN`.
    """
    counts = counts or PenaltyCounts(len(chunks))
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
        # The rest of the code then need not know of them: zeros are logits like any others.
        logits[damaged] = 0.0
    raw = _raw_logprobs(logits, rows)
    for index, row in enumerate(rows):
        if row.params.is_penalised:
            penalise(logits[index], row.params, counts.of(chunks[index]))
            _make_finite(logits[index])
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
    """Whether a row's token is the likeliest of its logits as they are, and nothing else is asked
    for."""
    params = row.params
    is_asked_alone = params.top_logprobs is None and not params.is_penalised
    return row.is_greedy and is_asked_alone and not is_constrained(chunk)


def _damaged_rows(logits: torch.Tensor) -> list[int]:
    """Lists the rows that have a NaN or an infinity: one of the row's extremes then is."""
    if logits.device.type == "cpu":
        # NumPy's reductions over rows take a tenth of torch's time.
        rows = logits.numpy()
        is_finite = np.isfinite(rows.min(-1)) & np.isfinite(rows.max(-1))
    else:
        least, greatest = torch.aminmax(logits, dim=-1)
        is_finite = (torch.isfinite(least) & torch.isfinite(greatest)).cpu().numpy()
    return [int(index) for index in np.flatnonzero(~is_finite)]


def _likeliest_ids(logits: torch.Tensor) -> list[int]:
    """Returns the likeliest token of each row, the first of equals."""
    if logits.device.type == "cpu":
        return [int(token) for token in logits.numpy().argmax(-1)]
    return _ids(logits.argmax(dim=-1))


def _make_finite(logits: torch.Tensor) -> None:
    """Replaces infinities that a penalty caused, in place."""
    logits.nan_to_num_(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)


def _sampled(request_id: str, token: int, raw: "_RawLogprobs | None") -> SampledToken:
    if raw is None or token == NO_TOKEN:
        return SampledToken(request_id, token, 0.0, [], [])
    logprob = float(raw.logprobs[token])
    return SampledToken(request_id, token, logprob, raw.top_ids, raw.top_logprobs)


@dataclass(frozen=True, slots=True)
class _RawLogprobs:
    """Log-probabilities of one row, before penalties and temperature."""

    logprobs: torch.Tensor  # [vocab]
    top_ids: list[int]
    top_logprobs: list[float]


def _raw_logprobs(logits: torch.Tensor, rows: Sequence[Row]) -> dict[int, _RawLogprobs]:
    """Computes log-probabilities of the model's own distribution, for rows that report them."""
    by_row = {}
    for index, row in enumerate(rows):
        if row.params.top_logprobs is None:
            continue
        logprobs = torch.log_softmax(logits[index], dim=-1)
        values, ids = logprobs.topk(min(row.params.top_logprobs, logprobs.shape[0]))
        by_row[index] = _RawLogprobs(logprobs, ids.tolist(), values.tolist())
    return by_row


class TokenCounts:
    """How often each token is in a history, which only grows: each token is counted once."""

    def __init__(self, history: list[int], num_prompt_tokens: int) -> None:
        self.history = history
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._outputs = np.empty(0, np.float32)

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens of the history, and how often each of them is in its output."""
        for position in range(self._num_counted, len(self.history)):
            token = self.history[position]
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place + 64, np.int64)])
                self._outputs = np.concatenate([self._outputs, np.zeros(place + 64, np.float32)])
            self._ids[place] = token
            self._outputs[place] += position >= self._num_prompt_tokens
        self._num_counted = len(self.history)
        num_tokens = len(self._places)
        ids, outputs = self._ids[:num_tokens], self._outputs[:num_tokens]
        return torch.from_numpy(ids), torch.from_numpy(outputs)


class PenaltyCounts:
    """The counts of requests with penalties, kept from step to step for those used last."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_request: OrderedDict[str, TokenCounts] = OrderedDict()

    def of(self, chunk: Chunk) -> TokenCounts:
        """Returns the counts of a chunk's history: those of the last step if it is the same list,
        which is what grows from step to step."""
        counts = self._by_request.pop(chunk.request_id, None)
        if counts is None or counts.history is not chunk.history:
            counts = TokenCounts(chunk.history, chunk.num_prompt_tokens)
        self._by_request[chunk.request_id] = counts
        if len(self._by_request) > self._max_requests:
            self._by_request.popitem(last=False)
        return counts


def penalise(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Applies penalties to one row in place.

    Repetition divides positive and multiplies negative logits of every token seen (Keskar et al.,
    2019); presence and frequency subtract, counting output only, as OpenAI documents them.
    """
    ids, outputs = (each.to(logits.device) for each in counts.update())
    values = logits[ids]
    penalty = params.repetition_penalty
    if penalty != 1.0:
        values = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        cost = params.presence_penalty + params.frequency_penalty * outputs
        values -= torch.where(outputs > 0, cost, torch.zeros_like(cost))
    logits[ids] = values


def choose(logits: torch.Tensor, rows: Sequence[Row], team: Team | None = None) -> list[int]:
    """Chooses the next token of each row, penalties already applied: by the library's threads or,
    for rows of which these would have to sort too much and where there are none, with torch."""
    if team is None:
        return _choose_with_torch(logits, rows)
    tokens = team.sample(logits, [row.draw() for row in rows])
    undecided = [index for index, token in enumerate(tokens) if token < 0]
    if undecided:
        chosen = _choose_with_torch(logits[undecided], [rows[index] for index in undecided])
        for index, token in zip(undecided, chosen, strict=True):
            tokens[index] = token
    return tokens


def _choose_with_torch(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    greedy = [index for index, row in enumerate(rows) if row.is_greedy]
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    free = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    if len(greedy) == len(rows):
        return _likeliest_ids(logits)
    tokens = dict(zip(greedy, _likeliest_ids(logits[greedy]) if greedy else [], strict=True))
    for some in _few(free):
        tokens |= zip(some, _choose_any(logits[some], [rows[i] for i in some]), strict=True)
    for some in _few(filtered):
        tokens |= _choose_filtered(logits[some], {i: rows[i] for i in some})
    return [tokens[index] for index in range(len(rows))]


def _few(indices: list[int]) -> list[list[int]]:
    return [indices[start : start + SORT_ROWS] for start in range(0, len(indices), SORT_ROWS)]


def _ids(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.tolist()]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """Returns [rows, 1] on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _noise(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    return _column([uniform(row.params.seed, row.position) for row in rows], like)


def _weights(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Computes probabilities at each row's temperature, up to a factor: the likeliest token has
    1."""
    temperature = _column([row.params.temperature for row in rows], logits)
    # One too small for float32 would be zero, and zero by zero is NaN.
    temperature.clamp_(min=torch.finfo(logits.dtype).tiny)
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).exp_()


def row_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums each row by itself, [rows, 1]: torch shares a lone row out to threads but not one of
    several, and the order of a sum decides its last bit."""
    return torch.stack([row.sum() for row in weights])[:, None]


def _draw(running: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverts the running sums [rows, n]: the first index whose sum exceeds noise * total."""
    total = running[:, -1:]
    # Rounding may give the total itself, which no sum exceeds.
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(running, target, right=True)[:, 0]
    return drawn.clamp_(max=running.shape[1] - 1)


def _choose_any(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    running = _weights(logits, rows).cumsum(-1)
    return _ids(_draw(running, _noise(rows, logits)))


def _choose_filtered(logits: torch.Tensor, rows: dict[int, Row]) -> dict[int, int]:
    """Chooses tokens by key; rows that a few candidates do not settle try more."""
    tokens: dict[int, int] = {}
    keys = list(rows)
    total = row_sums(_weights(logits, list(rows.values())))
    for width in (*CANDIDATES, logits.shape[1]):
        pending = [place for place, key in enumerate(keys) if key not in tokens]
        if not pending:
            break
        some = [rows[keys[place]] for place in pending]
        chosen, settled = _try_candidates(logits[pending], some, total[pending], width)
        tokens |= {
            keys[place]: token
            for place, token, done in zip(pending, chosen, settled, strict=True)
            if done
        }
    return tokens


def _try_candidates(
    logits: torch.Tensor, rows: Sequence[Row], total: torch.Tensor, width: int
) -> tuple[list[int], list[bool]]:
    """Chooses from the `width` likeliest tokens of each row, and says which rows need no more."""
    values, ids = likeliest(logits, width)
    weights = _weights(values, rows)
    running = weights.cumsum(-1)
    kept = _num_kept(weights, running, total, rows)
    # The last candidates may tie with tokens left out, so the kept must all be above the least.
    safe = (values > values[:, -1:]).sum(-1, keepdim=True)
    # The nucleus is a share of what top-k keeps, which is not known before all of it is there.
    is_nucleus_known = [row.params.top_k <= width or row.params.top_p >= 1.0 for row in rows]
    fits = (kept <= safe)[:, 0].tolist()
    is_all = width >= logits.shape[1]
    settled = [is_all or all(each) for each in zip(is_nucleus_known, fits, strict=True)]
    places = torch.arange(running.shape[1], device=running.device)
    running = torch.where(places < kept, running, running.gather(1, kept - 1))
    drawn = _draw(running, _noise(rows, logits))
    return _ids(ids.gather(1, drawn[:, None])[:, 0]), settled


def likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and ids of the `width` likeliest tokens, ties by id."""
    if width >= logits.shape[1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _num_kept(
    weights: torch.Tensor, running: torch.Tensor, total: torch.Tensor, rows: Sequence[Row]
) -> torch.Tensor:
    """Counts the sorted candidates that all three filters keep, [rows, 1], at least one."""
    width = weights.shape[1]
    top_k = [row.params.top_k if 0 < row.params.top_k < width else width for row in rows]
    limit = torch.tensor(top_k, device=weights.device)[:, None]
    limited = [0 < row.params.top_k <= width for row in rows]
    mass = torch.where(
        torch.tensor(limited, device=weights.device)[:, None], running.gather(1, limit - 1), total
    )
    before = running - weights
    top_p = _column([row.params.top_p for row in rows], weights)
    # top_p 1 keeps everything, whatever rounding did to the sums.
    inside = (before < top_p * mass) | (top_p >= 1.0)
    nucleus = inside.sum(-1, keepdim=True)
    likely = (weights >= _column([row.params.min_p for row in rows], weights)).sum(-1, keepdim=True)
    return torch.minimum(torch.minimum(nucleus, likely), limit).clamp_(min=1)
