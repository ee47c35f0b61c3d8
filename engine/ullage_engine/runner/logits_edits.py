"""Edits logits before a token is chosen, in this order: penalties, biases, banned tokens, masks.

The same arithmetic is implemented twice. `penalise` and `constrain` edit one row, which is fastest
on a CPU. `plan_edits` and `edit` handle a whole batch on a GPU, with a fixed number of kernels
regardless of the number of rows.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.kernels.staging import HostArrays, upload
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk

LARGEST = 1e30
"""Substitute for an infinite logit: far larger than any other logit, but sums of it stay finite."""

PENALTIES_AT_ONCE = 1 << 16
"""Maximum number of penalised logits that are edited at once.

This caps temporary memory at about 45 bytes per logit, no matter how long the histories are.
"""


class TokenCounts:
    """Counts the tokens in a request's history as it grows. Each position is counted only once."""

    def __init__(self, history: list[int], num_prompt_tokens: int) -> None:
        self.history = history
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._outputs = np.empty(0, np.float32)

    def update(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Count the tokens that were added since the last call.

        Return the distinct tokens of the whole history, and how often each occurs in the output.
        """
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
        return self._ids[:num_tokens], self._outputs[:num_tokens]


class PenaltyCounts:
    """Caches token counts for the most recently used requests with penalties."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_request: OrderedDict[str, TokenCounts] = OrderedDict()

    def of(self, chunk: Chunk) -> TokenCounts:
        """Return the token counts of a chunk's history.

        If the history is the same list object as in the previous step, only new tokens are counted.
        """
        counts = self._by_request.pop(chunk.request_id, None)
        if counts is None or counts.history is not chunk.history:
            counts = TokenCounts(chunk.history, chunk.num_prompt_tokens)
        self._by_request[chunk.request_id] = counts
        if len(self._by_request) > self._max_requests:
            self._by_request.popitem(last=False)
        return counts


def is_constrained(chunk: Chunk) -> bool:
    """Return whether `constrain` would change the chunk's logits."""
    sampling = chunk.sampling
    is_steered = sampling is not None and bool(sampling.logit_bias or sampling.allowed_token_ids)
    return chunk.allowed is not None or bool(chunk.banned) or is_steered


def _mask_of(chunk: Chunk, vocab: int) -> bytes | None:
    """Return a bit mask of the tokens that the grammar and the client both allow, or None for all.

    The mask may be shorter than the vocabulary, and then allows nothing behind its end.
    """
    token_ids = chunk.sampling.allowed_token_ids if chunk.sampling else ()
    if not token_ids:
        return chunk.allowed
    mask = _mask_of_tokens(token_ids, vocab)
    if chunk.allowed is None:
        return mask
    size = min(len(mask), len(chunk.allowed))
    both = np.frombuffer(mask, np.uint8)[:size] & np.frombuffer(chunk.allowed, np.uint8)[:size]
    return both.tobytes()


@functools.lru_cache(maxsize=64)
def _mask_of_tokens(token_ids: tuple[int, ...], vocab: int) -> bytes:
    bits = np.zeros(vocab, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def penalise(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Apply penalties to one row of logits in place. The logits stay finite.

    For every token that has occurred, the repetition penalty divides a positive logit and
    multiplies a negative one (Keskar et al., 2019). Presence and frequency penalties are subtracted
    and count only output tokens, as OpenAI documents them.
    """
    ids, outputs = (torch.from_numpy(each) for each in counts.update())
    values = logits[ids]
    penalty = params.repetition_penalty
    if penalty != 1.0:
        values = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        cost = params.presence_penalty + params.frequency_penalty * outputs
        values -= torch.where(outputs > 0, cost, torch.zeros_like(cost))
    logits[ids] = _finite(values)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Replace infinite logits, which penalties can produce, with large finite ones, in place."""
    return values.nan_to_num_(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)


def constrain(logits: torch.Tensor, chunk: Chunk) -> None:
    """Apply a chunk's biases and masks to its row of logits [vocab], in place.

    A token that is ruled out gets the logit -inf, so it has no probability at any temperature.
    """
    bias = chunk.sampling.logit_bias if chunk.sampling else {}
    if bias:
        logits[torch.tensor(list(bias))] += torch.tensor(list(bias.values()), dtype=logits.dtype)
    if chunk.banned:
        logits[torch.tensor(chunk.banned)] = -torch.inf
    mask = _mask_of(chunk, logits.shape[0])
    if mask is not None:
        _allow(logits, mask)


def _allow(logits: torch.Tensor, allowed: bytes) -> None:
    """Rule out all tokens whose bit in the mask is not set, in place.

    Most masks allow either a few tokens or nearly all of them. For speed, only the bytes that
    contain the rarer kind of bit are unpacked.
    """
    vocab = logits.shape[0]
    bits = np.frombuffer(allowed, np.uint8)[: -(-vocab // 8)]
    some_allowed = np.flatnonzero(bits)
    some_banned = np.flatnonzero(bits != 0xFF)
    if len(some_banned) <= len(some_allowed):
        logits[_tokens_of(bits, some_banned, 0, vocab)] = -torch.inf
        # A mask shorter than the vocabulary allows nothing behind its end.
        logits[8 * len(bits) :] = -torch.inf
        return

    kept = _tokens_of(bits, some_allowed, 1, vocab)
    values = logits[kept]
    logits.fill_(-torch.inf)
    logits[kept] = values


def _tokens_of(
    bits: npt.NDArray[np.uint8], places: npt.NDArray[np.intp], bit: int, vocab: int
) -> torch.Tensor:
    """Return the ids of tokens whose mask bit equals `bit`, within the given mask bytes."""
    unpacked = np.unpackbits(bits[places], bitorder="little").reshape(-1, 8)
    rows, columns = np.nonzero(unpacked == bit)
    ids = places[rows] * 8 + columns
    return torch.from_numpy(ids[ids < vocab])


@dataclass(frozen=True, slots=True)
class Edits:
    """A batch's edits, as arrays in which logits are indexed by row * vocab + token."""

    arrays: HostArrays
    """Arrays to upload with the batch's other parameters. Empty if nothing is edited."""
    more_penalties: Sequence[HostArrays]
    """Arrays for the penalised logits beyond the first `PENALTIES_AT_ONCE`."""

    @property
    def rules_out(self) -> bool:
        """Whether any token is ruled out."""
        return "banned" in self.arrays or "ruled_out" in self.arrays


def plan_edits(chunks: Sequence[Chunk], counts: PenaltyCounts, vocab: int) -> Edits:
    """Prepare the edits for a batch's logits [rows, vocab], which have one row per chunk."""
    if not any(map(_is_edited, chunks)):
        return Edits({}, [])
    first_penalties, *more_penalties = [*_penalties(chunks, counts, vocab)] or [{}]
    constraints = {**_biases(chunks, vocab), **_bans(chunks, vocab), **_masks(chunks, vocab)}
    return Edits({**first_penalties, **constraints}, more_penalties)


def _is_edited(chunk: Chunk) -> bool:
    is_penalised = chunk.sampling is not None and chunk.sampling.is_penalised
    return is_penalised or is_constrained(chunk)


def _penalties(
    chunks: Sequence[Chunk], counts: PenaltyCounts, vocab: int
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield arrays that describe the logits to penalise, at most `PENALTIES_AT_ONCE` at a time."""
    numbers = []
    outputs = []
    params = np.zeros((3, len(chunks)), np.float32)
    for row, chunk in enumerate(chunks):
        sampling = chunk.sampling
        if sampling is None or not sampling.is_penalised:
            continue
        row_ids, row_outputs = counts.of(chunk).update()
        numbers.append(row_ids + row * vocab)
        outputs.append(row_outputs)
        params[:, row] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
    if not numbers:
        return

    all_numbers = np.concatenate(numbers)
    all_outputs = np.concatenate(outputs)
    for start in range(0, len(all_numbers), PENALTIES_AT_ONCE):
        piece = slice(start, start + PENALTIES_AT_ONCE)
        yield {
            "penalised": all_numbers[piece],
            "outputs": all_outputs[piece],
            "repetition": params[0],
            "presence": params[1],
            "frequency": params[2],
        }


def _biases(chunks: Sequence[Chunk], vocab: int) -> dict[str, npt.NDArray[np.generic]]:
    biases = [chunk.sampling.logit_bias if chunk.sampling else {} for chunk in chunks]
    if not any(biases):
        return {}
    numbers = [row * vocab + token for row, bias in enumerate(biases) for token in bias]
    values = [value for bias in biases for value in bias.values()]
    return {"biased": np.array(numbers, np.int64), "biases": np.array(values, np.float32)}


def _bans(chunks: Sequence[Chunk], vocab: int) -> dict[str, npt.NDArray[np.generic]]:
    numbers = [row * vocab + token for row, chunk in enumerate(chunks) for token in chunk.banned]
    return {"banned": np.array(numbers, np.int64)} if numbers else {}


def _masks(chunks: Sequence[Chunk], vocab: int) -> dict[str, npt.NDArray[np.generic]]:
    """Return the masks and the index of each row's mask, or an empty dict if no row has a mask.

    A set bit in a mask rules out a token. Rows without a mask share the first one, which rules out
    no token.
    """
    mask_by_row = [_mask_of(chunk, vocab) for chunk in chunks]
    masks = [mask for mask in mask_by_row if mask is not None]
    if not masks:
        return {}
    ruled_out = np.full((1 + len(masks), -(-vocab // 8)), 0xFF, np.uint8)
    ruled_out[0] = 0
    for place, allowed in enumerate(masks, start=1):
        bits = np.frombuffer(allowed, np.uint8)[: ruled_out.shape[1]]
        ruled_out[place, : len(bits)] = ~bits

    has_mask = np.array([mask is not None for mask in mask_by_row])
    return {
        "ruled_out": ruled_out,
        "mask_of_row": np.where(has_mask, np.cumsum(has_mask), 0),
        "bit_places": np.arange(8, dtype=np.uint8),
    }


def edit(logits: torch.Tensor, edits: Edits, on_device: Mapping[str, torch.Tensor]) -> None:
    """Apply edits to contiguous float32 logits [rows, vocab] in place.

    `on_device` holds the arrays of `edits` on the device.
    """
    # Each index occurs once, so the order in which a GPU writes does not matter.
    flat = logits.view(-1)
    if "penalised" in on_device:
        _penalise_batch(flat, logits.shape[1], on_device)
    for piece in edits.more_penalties:
        _penalise_batch(flat, logits.shape[1], upload(piece, logits.device))
    if "biased" in on_device:
        flat.index_add_(0, on_device["biased"], on_device["biases"])
    if "banned" in on_device:
        flat.index_fill_(0, on_device["banned"], -torch.inf)
    if "ruled_out" in on_device:
        _mask_batch(logits, on_device)


def _penalise_batch(flat: torch.Tensor, vocab: int, on_device: Mapping[str, torch.Tensor]) -> None:
    numbers = on_device["penalised"]
    outputs = on_device["outputs"]
    rows = numbers.div(vocab, rounding_mode="floor")

    values = flat.index_select(0, numbers)
    repetition = on_device["repetition"].index_select(0, rows)
    values = torch.where(values > 0, values / repetition, values * repetition)

    cost = on_device["frequency"].index_select(0, rows).mul_(outputs)
    cost.add_(on_device["presence"].index_select(0, rows))
    # Not where(..., 0.0): CUDA copies a scalar there to the device, and the host waits for that.
    values.sub_(cost.masked_fill_(outputs <= 0, 0.0))
    flat.index_copy_(0, numbers, _finite(values))


def _mask_batch(logits: torch.Tensor, on_device: Mapping[str, torch.Tensor]) -> None:
    rows, vocab = logits.shape
    masks = on_device["ruled_out"].index_select(0, on_device["mask_of_row"])
    bits = torch.bitwise_right_shift(masks[:, :, None], on_device["bit_places"]).bitwise_and_(1)
    logits.masked_fill_(bits.view(rows, -1).view(torch.bool)[:, :vocab], -torch.inf)
