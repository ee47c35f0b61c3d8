"""Speculation by prompt lookup: a step checks draft tokens, which followed the last ones before.

Where few sequences decode, a step that computes a few rows takes about as long as one that computes
one. So a sequence's own text is searched for its last tokens, and the tokens behind them are its
draft. The step computes them as one chunk and samples behind each: what it draws there is the
answer's next token as long as the draft was right up to there. Noise is a function of the seed and
the position, so the answer is the one that it would be without drafts, greedy or sampled.

The KV of rejected tokens lies behind what counts as computed, and is overwritten. Requests with a
grammar, with penalties, or of a beam search have no drafts, because what may follow a token depends
on tokens before it in more than its KV.
"""

from collections.abc import Sequence as Tokens

from msgspec.structs import replace

from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.protocol.step_plan import Chunk, SampledToken
from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_engine.scheduler.sequence import Sequence

MAX_SPECULATING = 4
"""Sequences of which all may speculate; where more decode, rows are no longer nearly free."""

NGRAM = 3
"""Tokens at the end of a text that are looked up."""
LOOKUP_TOKENS = 4096
"""Tokens before the end of a text that they are looked up in. Indexing them takes about a
millisecond, and half a megabyte."""

MIN_ACCEPTANCE = 0.25
"""Share of draft tokens that must be right lately; a sequence below it pauses."""
PAUSE_TOKENS = 64
"""Tokens that a sequence computes one by one before it has drafts again."""
_WEIGHT = 0.2
"""Weight of the last draft in the running share of right tokens."""


class PromptLookup:
    """Drafts what followed the last tokens of a text where they were last before.

    Every token is indexed once, so that a draft takes as long in a long text as in a short one.
    """

    def __init__(self, token_ids: list[int], lookup_tokens: int = LOOKUP_TOKENS) -> None:
        """`token_ids` may grow between calls, at its end."""
        self._token_ids = token_ids
        self._lookup_tokens = lookup_tokens
        self._followed: dict[tuple[int, ...], int] = {}
        """Position behind the last occurrence of each n-gram that has a token behind it."""
        self._first = self._next = NGRAM
        """Positions of the index: the first in it, and the one behind them."""

    @property
    def num_ngrams(self) -> int:
        """N-grams in the index."""
        return len(self._followed)

    def draft(self, count: int) -> list[int]:
        """Return the `count` tokens that would come next, or none."""
        tokens = self._token_ids
        self._index(len(tokens))
        start = self._followed.get(tuple(tokens[-NGRAM:]))
        if start is None:
            return []
        draft = tokens[start : start + count]
        # What repeats itself up to the end of the text goes on with its beginning.
        period = len(tokens) - start
        while len(draft) < count:
            draft.append(draft[len(draft) - period])
        return draft

    def _index(self, length: int) -> None:
        tokens = self._token_ids
        followed = self._followed
        first = max(NGRAM, length - self._lookup_tokens)
        if first > self._next:
            followed.clear()
            self._first = self._next = first
        for end in range(self._next, length):
            followed[tuple(tokens[end - NGRAM : end])] = end
        for end in range(self._first, first):
            if followed.get(ngram := tuple(tokens[end - NGRAM : end])) == end:
                del followed[ngram]
        self._first, self._next = first, max(self._next, length)


class _Drafts:
    """The drafts for one sequence, and how much of them was right lately."""

    def __init__(self, token_ids: list[int]) -> None:
        self.lookup = PromptLookup(token_ids)
        self.acceptance = 1.0
        self.paused_until = 0
        """Length in tokens at which the sequence has drafts again."""

    def observe(self, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        share = num_accepted / num_draft_tokens
        self.acceptance += _WEIGHT * (share - self.acceptance)
        if self.acceptance < MIN_ACCEPTANCE:
            self.acceptance = MIN_ACCEPTANCE
            self.paused_until = num_tokens + PAUSE_TOKENS


class Speculation:
    """Drafts tokens for the sequences of a step, and accepts those that were sampled."""

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache) -> None:
        assert limits.max_in_flight == 1, "a draft follows a token that is known"
        self.num_draft_tokens = 0
        """Draft tokens checked so far."""
        self.num_accepted_tokens = 0
        self._num_tokens = limits.num_speculative_tokens
        self._max_rows = limits.max_sequences
        """Rows that steps have room for; drafts take those of sequences that are not there."""
        self._cache = cache
        self._drafts: dict[Sequence, _Drafts] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences of which anything is kept."""
        return len(self._drafts)

    def draft(self, decoding: list[Sequence], num_running: int) -> dict[Sequence, list[int]]:
        """Return the tokens to check behind the last one of each decoding sequence that has
        any."""
        if len(decoding) > MAX_SPECULATING:
            return {}
        most = min(self._num_tokens, self._max_rows // max(1, num_running) - 1)
        drafted: dict[Sequence, list[int]] = {}
        for sequence in decoding:
            count = min(most, self._room(sequence))
            if count <= 0 or not may_speculate(sequence):
                continue
            drafts = self._drafts.get(sequence)
            if drafts is None:
                drafts = self._drafts[sequence] = _Drafts(sequence.token_ids)
            is_paused = len(sequence.token_ids) < drafts.paused_until
            if not is_paused and (draft := drafts.lookup.draft(count)):
                drafted[sequence] = draft
        return drafted

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that ends."""
        self._drafts.pop(sequence, None)

    def verify(
        self, planned: dict[str, tuple[Sequence, Chunk]], sampled: list[SampledToken]
    ) -> tuple[list[SampledToken], dict[str, list[SampledToken]]]:
        """Accept draft tokens of a plan, and make it the plan of accepted ones.

        These are appended to their sequences. Returns the last token of each sequence, which is
        not, and for some the accepted ones before it.
        """
        drawn: dict[str, list[SampledToken]] = {}
        for token in sampled:
            drawn.setdefault(token.request_id, []).append(token)
        for request_id, (sequence, chunk) in planned.items():
            if chunk.num_sampled == 1 or request_id not in drawn:
                continue
            tokens = accepted(sequence, chunk, drawn[request_id])
            num_draft_tokens = chunk.num_sampled - 1
            sequence.token_ids += [token.token_id for token in tokens[:-1]]
            computed = replace(chunk, token_ids=chunk.token_ids[: len(tokens)], num_sampled=1)
            planned[request_id] = (sequence, computed)
            drawn[request_id] = tokens
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += len(tokens) - 1
            drafts = self._drafts[sequence]
            drafts.observe(num_draft_tokens, len(tokens) - 1, len(sequence.token_ids))
        last = [tokens[-1] for tokens in drawn.values()]
        return last, {name: tokens[:-1] for name, tokens in drawn.items() if len(tokens) > 1}

    def _room(self, sequence: Sequence) -> int:
        """Count the tokens that a draft may have: as many as are left of the answer before its
        last, in blocks that the sequence has or has reserved, so that nobody is preempted."""
        size = self._cache.block_tokens
        cache = self._cache
        num_blocks = len(sequence.blocks.ids) + sequence.num_reserved
        # Behind a fork the block that is written next is shared: its copy takes a reserved one.
        num_blocks -= cache.is_shared_at(sequence.blocks.ids, sequence.num_computed // size)
        in_blocks = num_blocks * size - len(sequence.token_ids)
        return min(sequence.max_length - len(sequence.token_ids) - 1, in_blocks)


def may_speculate(sequence: Sequence) -> bool:
    """Whether the next tokens depend on those before them by their KV alone."""
    request = sequence.request
    is_free = not (request.grammar or request.beam or request.sampling.is_penalised)
    return is_free and sequence.num_output >= request.min_tokens


def accepted(sequence: Sequence, chunk: Chunk, drawn: Tokens[SampledToken]) -> list[SampledToken]:
    """Return the tokens drawn behind right draft tokens, up to one that ends the answer."""
    tokens: list[SampledToken] = []
    draft = chunk.token_ids[len(chunk.token_ids) - len(drawn) + 1 :]
    for place, token in enumerate(drawn):
        tokens.append(token)
        is_end = token.token_id in sequence.request.stop_token_ids
        if is_end or place == len(draft) or draft[place] != token.token_id:
            break
    return tokens
