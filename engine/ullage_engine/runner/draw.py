"""Draws random tokens from rows of logits, on any device and without involving the host.

The filters are top-k, top-p (as a fraction of the probability mass that top-k keeps) and min-p.
Each filter keeps a prefix of the tokens, sorted by (logit descending, id ascending). A token is
drawn by inverse transform sampling: it is the first token at which the cumulative weight of the
kept tokens exceeds the row's random fraction of their total. Weights are accumulated in sorted
order if the row is filtered, and in id order otherwise.

Draws are batch-invariant even though a GPU sums a row in an order that depends on the number of
rows. This works because weights are integers (see `FIXED_POINT`), whose sums are exact in any
order. Only the first additions of `_block_sums` are in float32. They add tensors element by
element, so their results do not depend on the number of rows either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from ullage_engine.kernels.staging import HostArrays
from ullage_engine.native.library import Draw
from ullage_engine.protocol.requests import SamplingParams

FIXED_POINT = 2.0**42
"""Integer weight of the likeliest token.

Weights are rounded down to integers. A weight of 1 corresponds to 2e-13 of the likeliest token's
probability. The total weight of 2**20 tokens fits in int64.
"""

BLOCK = 128
"""Number of neighbouring tokens per block. Weights are summed by block before cumulative sums."""

UNSETTLED = -2
"""Placeholder for the token if a row's filters keep more tokens than there are candidates.

Such a row is drawn again.
"""

_ALTERNATIVES = 64
"""Number of likeliest tokens that are sorted to find a row's alternatives.

This exceeds the number of alternatives reported, so that tokens tied with the last one are
included.
"""

_KEEP_ALL = 1.5
"""Value of top_p for rows without a top-p limit.

No sum of probabilities reaches this value, even with rounding errors.
"""

_MASK = (1 << 64) - 1
"""Mask of all bits of a 64-bit integer."""
_GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator: 2**64 divided by the golden ratio."""


def uniform(seed: int, position: int) -> float:
    """Return a pseudorandom number in (0, 1) for the token at `position`, given the request's seed.

    Two rounds of SplitMix64 (Steele, Lea and Flood, 2014) mix seed and position. The number has 23
    bits, so that both it and its distance from 1 are exact in float32.
    """
    mixed = _mix((_mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (position + 1)) & _MASK)
    return ((mixed >> 41) + 0.5) / (1 << 23)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


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
        has_filter = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        return has_filter and not self.is_greedy

    @property
    def is_free(self) -> bool:
        """Whether any token may be drawn: the row is neither filtered nor greedy."""
        return not self.is_filtered and not self.is_greedy

    @property
    def noise(self) -> float:
        return uniform(self.params.seed, self.position)

    def draw(self) -> Draw:
        """Return the row's sampling parameters as a structure for the C++ library."""
        params = self.params
        return Draw(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            noise=0.0 if self.is_greedy else self.noise,
            top_k=params.top_k,
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """How to draw the tokens of a batch: which filters are in use, and each row's parameters.

    Created on the host by `plan_draws` and used by `draw_tokens`.
    """

    width: int
    """Number of candidates (likeliest tokens) for each filtered row."""
    any_greedy: bool
    any_filtered: bool
    any_free: bool
    any_nucleus: bool
    """Whether top-p limits any row."""
    any_min_p: bool
    needs_mass: bool
    """Whether any row needs the total weight of the whole vocabulary."""
    arrays: HostArrays
    """Arrays of sampling parameters, [rows, 1] each. Empty if all rows are greedy."""


def plan_draws(rows: Sequence[Row], width: int) -> Draws:
    """Plan how to draw a token for each row.

    Filtered rows draw from their `width` likeliest tokens.
    """
    filtered = [row.params for row in rows if row.is_filtered]
    any_free = any(row.is_free for row in rows)
    any_greedy = any(row.is_greedy for row in rows)
    nuclei = [params for params in filtered if params.top_p < 1.0]
    return Draws(
        width=width,
        any_greedy=any_greedy,
        any_filtered=bool(filtered),
        any_free=any_free,
        any_nucleus=bool(nuclei),
        any_min_p=any(params.min_p > 0.0 for params in filtered),
        needs_mass=any_free or any(not 0 < params.top_k <= width for params in nuclei),
        arrays=_parameters(rows, width) if filtered or any_free else {},
    )


def _parameters(rows: Sequence[Row], width: int) -> HostArrays:
    params = [row.params for row in rows]
    top_k = _column([each.top_k for each in params], np.int64)
    top_p = _column([each.top_p for each in params], np.float64)
    min_p = _column([each.min_p for each in params], np.float32)

    # A temperature too small for float32 would be zero, and zero by zero is NaN. Greedy rows may
    # have any temperature.
    tiny = float(np.finfo(np.float32).tiny)
    temperature = [1.0 if row.is_greedy else max(row.params.temperature, tiny) for row in rows]
    has_top_k = (top_k > 0) & (top_k <= width)
    keeps_all = top_p >= 1.0
    return {
        "temperature": _column(temperature, np.float32),
        "noise": _column([0.0 if row.is_greedy else row.noise for row in rows], np.float64),
        "top_p": np.where(keeps_all, _KEEP_ALL, top_p),
        # Negative, because searchsorted needs ascending values.
        "least_weight": min_p * np.float32(-FIXED_POINT),
        "last_of_top_k": np.where(has_top_k, top_k, width) - 1,
        "has_top_k": has_top_k,
        # The nucleus is a share of the mass that top-k keeps, which is unknown until top-k fits in
        # the candidates.
        "is_unknown": (top_k > width) & ~keeps_all,
        "is_filtered": _column([row.is_filtered for row in rows], np.bool_),
        "is_free": _column([row.is_free for row in rows], np.bool_),
    }


def _column(values: Sequence[float], dtype: type[np.generic]) -> np.ndarray:
    return np.array(values, dtype)[:, None]


def draw_tokens(
    logits: torch.Tensor, draws: Draws, on_device: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: float32 [rows, vocab], which are overwritten.
        draws: result of `plan_draws`.
        on_device: the arrays of `draws`, on the device.

    Returns:
        Tokens, int64 [rows, 1]. A token is `UNSETTLED` if the row's candidates are not enough to
        determine it, which cannot happen if the candidates are the whole vocabulary. Rows with NaN
        or infinite logits, or without a logit above -inf, get an arbitrary token, because callers
        detect these rows themselves.
    """
    if draws.any_greedy:
        greatest, first = logits.max(dim=-1, keepdim=True)
        chosen = {"is_greedy": first}
    else:
        # A CPU takes a sixth of the time if it does not compute the places of maxima.
        greatest = logits.amax(dim=-1, keepdim=True)
        chosen = {}

    # Candidates are taken first, since the logits become weights below.
    candidates = likeliest(logits, draws.width) if draws.any_filtered else None
    mass = None
    if draws.needs_mass:
        blocks = _blocks(logits, greatest, on_device["temperature"])
        sums = _block_sums(blocks)
        running = sums.cumsum(-1)
        mass = running[:, -1:]
    if draws.any_free:
        drawn = _draw_of_blocks(blocks, sums, running, on_device["noise"])
        # A token of the padding is drawn only if no token is above -inf.
        chosen["is_free"] = drawn.clamp_(max=logits.shape[1] - 1)
    if candidates is not None:
        drawn = _draw_of_candidates(*candidates, mass, draws, on_device, logits.shape[1])
        chosen["is_filtered"] = drawn

    (_, tokens), *others = chosen.items()
    for kind, drawn in others:
        tokens = torch.where(on_device[kind], drawn, tokens)
    return tokens


def likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and ids of the `width` likeliest tokens, with ties in id order.

    If several tokens tie for the last place, the choice among them is arbitrary.
    """
    if width >= logits.shape[1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def alternatives(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and ids of the `count` likeliest tokens, with ties in id order."""
    values, ids = likeliest(logits, max(_ALTERNATIVES, count))
    return values[:, :count], ids[:, :count]


def log_masses(logits: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logit - greatest))) of each row, float32 [rows, 1].

    The logits are overwritten.
    """
    mass = _block_sums(_blocks(logits, greatest, None)).sum(-1, keepdim=True)
    return mass.double().div_(FIXED_POINT).log_().float()


def _weigh(differences: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Convert each logit's difference from the row's greatest logit to a weight, in place."""
    if temperature is not None:
        differences.div_(temperature)
    return differences.exp_().mul_(FIXED_POINT)


def _blocks(
    logits: torch.Tensor, greatest: torch.Tensor, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Convert logits to integer-valued weights [rows, blocks, BLOCK], overwriting the logits."""
    rows, vocab = logits.shape
    if vocab % BLOCK:
        logits = pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    # Rounded before anything is added up: a block has a sum where one of its tokens has a weight.
    weights = _weigh(logits.sub_(greatest), temperature).floor_()
    return weights.view(rows, -1, BLOCK)


def _block_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block as int64 [rows, blocks].

    The first three additions are in float32, because int64 would take twice the memory of the
    logits. They add tensors element by element, so their results do not depend on the batch. Their
    error is at most 3 * 2**-24.
    """
    half = BLOCK // 2
    quarter = BLOCK // 4
    eighth = BLOCK // 8
    sums = blocks[..., :half] + blocks[..., half:]
    sums = sums[..., :quarter].add_(sums[..., quarter:])
    sums = sums[..., :eighth].add_(sums[..., eighth:])
    return sums.long().sum(-1)


def _draw_of_blocks(
    blocks: torch.Tensor, sums: torch.Tensor, running: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Draw from all tokens in id order: first pick the block, then the token within the block."""
    target = (running[:, -1:] * noise).long()
    block = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = running.gather(1, block) - sums.gather(1, block)

    weights = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    inside = weights.long().cumsum(-1)
    # The block's sum was rounded, so the target could lie behind the block's last token.
    rest = torch.minimum(target - before, inside[:, -1:] - 1)
    place = torch.searchsorted(inside, rest, right=True).clamp_(max=BLOCK - 1)
    return place.add_(block, alpha=BLOCK)


def _draw_of_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    mass: torch.Tensor | None,
    draws: Draws,
    on_device: Mapping[str, torch.Tensor],
    vocab: int,
) -> torch.Tensor:
    """Draw one of the sorted candidates that pass the filters.

    `mass` is the total weight of all tokens in a row.
    """
    weights = _weigh(values - values[:, :1], on_device["temperature"])
    running = weights.long().cumsum(-1)
    last = _last_kept(weights, running, mass, draws, on_device)

    target = (running.gather(1, last) * on_device["noise"]).long()
    place = torch.searchsorted(running, target, right=True).clamp_(max=values.shape[1] - 1)
    tokens = ids.gather(1, place)
    if draws.width >= vocab:
        return tokens

    # The last candidates may tie with tokens left out, so the kept must all be above the least,
    # unless that has no weight: a mask or a low temperature leaves fewer tokens than top-k keeps.
    is_unsettled = values.gather(1, last) <= values[:, -1:]
    is_unsettled.logical_and_(weights[:, -1:] >= 1.0)
    return tokens.masked_fill_(is_unsettled.logical_or_(on_device["is_unknown"]), UNSETTLED)


def _last_kept(
    weights: torch.Tensor,
    running: torch.Tensor,
    mass: torch.Tensor | None,
    draws: Draws,
    on_device: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the index of the last candidate that passes all three filters, int64 [rows, 1]."""
    last = on_device["last_of_top_k"]
    if draws.any_nucleus:
        share = running.gather(1, last)
        if mass is not None:
            share = torch.where(on_device["has_top_k"], share, mass)
        # A token is kept if those before it have less than this.
        enough = (share * on_device["top_p"]).ceil_().long()
        last = torch.minimum(last, torch.searchsorted(running, enough))
    if draws.any_min_p:
        num_likely = torch.searchsorted(weights.neg(), on_device["least_weight"], right=True)
        last = torch.minimum(last, num_likely.sub_(1))
        # A row with NaN may have none.
        last.clamp_(min=0)
    return last
