"""Speculative decoding by prompt lookup, which drafts tokens by copying from the text itself.

If few sequences are decoding, computing several tokens per sequence takes about as long as
computing one. The scheduler therefore searches a sequence's text for an earlier occurrence of its
last few tokens, and uses the tokens that followed there as a draft. The step computes the draft as
one chunk and samples a token after each draft token. A sampled token is accepted if all draft
tokens before it were correct. Sampling noise depends only on the seed and the position, so drafts
change neither greedy nor sampled answers.

The KV of rejected tokens lies after `num_computed` and is overwritten later. There are no drafts
for requests with a grammar, bad words, penalties or beam search, because their next token depends
on more than the KV of earlier tokens.
"""

from collections.abc import Sequence as Tokens

from msgspec.structs import replace

from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.protocol.step_plan import Chunk, SampledToken
from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_engine.scheduler.sequence import Sequence

MAX_SPECULATING = 4
"""Maximum number of decoding sequences for which a step uses drafts. With more sequences, verifying
draft tokens is no longer cheap."""

NGRAM = 3
"""Length of the n-gram at the end of a text to look up, in tokens."""
LOOKUP_TOKENS = 4096
"""Maximum number of recent tokens of a text to index.

Indexing this many tokens takes about a millisecond and half a megabyte of memory.
"""

MIN_ACCEPTANCE = 0.25
"""Acceptance rate of recent draft tokens below which drafting is paused for a sequence."""
PAUSE_TOKENS = 64
"""Number of tokens for which drafting is paused after too many rejected drafts."""
_WEIGHT = 0.2
"""Weight of the latest draft in the moving average of the acceptance rate."""


class PromptLookup:
    """Drafts tokens by repeating what followed the previous occurrence of a text's last n-gram.

    Each token is indexed only once, so the time per draft does not depend on the text's length.
    """

    def __init__(self, token_ids: list[int], lookup_tokens: int = LOOKUP_TOKENS) -> None:
        """Create an index of `token_ids`, which callers may append to between calls."""
        self._token_ids = token_ids
        self._lookup_tokens = lookup_tokens
        self._followed: dict[tuple[int, ...], int] = {}
        """For each n-gram, the position of the token after its last indexed occurrence."""

        # The index has the positions `_first` to `_next` - 1.
        self._first = NGRAM
        self._next = NGRAM

    @property
    def num_ngrams(self) -> int:
        """Return the number of n-grams in the index."""
        return len(self._followed)

    def draft(self, count: int) -> list[int]:
        """Predict the next `count` tokens, or return an empty list if no n-gram matches."""
        tokens = self._token_ids
        self._index(len(tokens))
        start = self._followed.get(tuple(tokens[-NGRAM:]))
        if start is None:
            return []

        draft = tokens[start : start + count]
        # Where the text ends first, it is taken to be periodic and goes on from `start`.
        period = len(tokens) - start
        while len(draft) < count:
            draft.append(draft[len(draft) - period])
        return draft

    def _index(self, length: int) -> None:
        """Index n-grams whose next token is before position `length`, and drop those too old."""
        tokens = self._token_ids
        followed = self._followed

        first = max(NGRAM, length - self._lookup_tokens)
        if first > self._next:
            followed.clear()
            self._first = first
            self._next = first

        for end in range(self._next, length):
            followed[tuple(tokens[end - NGRAM : end])] = end
        for end in range(self._first, first):
            ngram = tuple(tokens[end - NGRAM : end])
            # A later occurrence has overwritten the entry, and stays.
            if followed.get(ngram) == end:
                del followed[ngram]

        self._first = first
        self._next = max(self._next, length)


class _Drafts:
    """Drafting state of one sequence: its draft index and its recent acceptance rate."""

    def __init__(self, token_ids: list[int]) -> None:
        self.lookup = PromptLookup(token_ids)
        self.acceptance = 1.0
        self.paused_until = 0
        """Length in tokens from which drafting resumes."""

    def observe(self, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        """Update the acceptance rate after a draft, and pause drafting if the rate is too low.

        `num_tokens` is the current length of the sequence in tokens.
        """
        share = num_accepted / num_draft_tokens
        self.acceptance += _WEIGHT * (share - self.acceptance)
        if self.acceptance < MIN_ACCEPTANCE:
            self.acceptance = MIN_ACCEPTANCE
            self.paused_until = num_tokens + PAUSE_TOKENS


class Speculation:
    """Drafts tokens for a step's sequences, and accepts draft tokens that sampling confirms."""

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache) -> None:
        assert limits.max_in_flight == 1, "a draft follows a token that is known"
        self.num_draft_tokens = 0
        """Number of draft tokens that have been verified so far."""
        self.num_accepted_tokens = 0
        self._num_tokens = limits.num_speculative_tokens
        self._max_rows = limits.max_sequences
        """Maximum number of logits rows in a step. Drafts use the rows that the batch does not
        need."""
        self._cache = cache
        self._drafts: dict[Sequence, _Drafts] = {}

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that have a draft index."""
        return len(self._drafts)

    def draft(self, decoding: list[Sequence], num_running: int) -> dict[Sequence, list[int]]:
        """Draft tokens for the sequences that the step decodes.

        Sequences without a draft are left out of the result.

        Args:
            decoding: sequences that the step decodes.
            num_running: number of sequences in the batch.
        """
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
                drafts = _Drafts(sequence.token_ids)
                self._drafts[sequence] = drafts
            is_paused = len(sequence.token_ids) < drafts.paused_until
            if not is_paused and (draft := drafts.lookup.draft(count)):
                drafted[sequence] = draft
        return drafted

    def forget(self, sequence: Sequence) -> None:
        """Drop the draft index of a sequence that has ended."""
        self._drafts.pop(sequence, None)

    def verify(
        self, planned: dict[str, tuple[Sequence, Chunk]], sampled: list[SampledToken]
    ) -> tuple[list[SampledToken], dict[str, list[SampledToken]]]:
        """Append correct draft tokens to their sequences, and remove wrong ones from the chunks.

        A truncated chunk ends after its last accepted token, as if it had never contained the
        rejected tokens.

        Args:
            planned: the plan's entries, which are modified.
            sampled: the sampled tokens. A chunk with a draft has one sampled token after each of
                its tokens.

        Returns:
            The last sampled token of each sequence, which has not been appended yet, and a dict of
            the accepted tokens before it, by request id. The dict leaves out sequences that
            have no accepted tokens.
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
        """Return how many draft tokens may be added to a sequence.

        There must be room for one more token after the draft. The draft may only use blocks that
        the sequence holds or has reserved, so that drafts never cause preemptions.
        """
        cache = self._cache
        size = cache.block_tokens
        num_blocks = len(sequence.blocks.ids) + sequence.num_reserved
        # After a fork the block to write next is shared, and its copy takes a reserved block.
        num_blocks -= cache.is_shared_at(sequence.blocks.ids, sequence.num_computed // size)
        in_blocks = num_blocks * size - len(sequence.token_ids)
        return min(sequence.max_length - len(sequence.token_ids) - 1, in_blocks)


def may_speculate(sequence: Sequence) -> bool:
    """Return whether a sequence's next token depends only on the KV, so that drafts are safe."""
    request = sequence.request
    depends_on_text = request.grammar or request.bad_words or request.sampling.is_penalised
    is_free = not (depends_on_text or request.beam)
    return is_free and sequence.num_output >= request.min_tokens


def accepted(sequence: Sequence, chunk: Chunk, drawn: Tokens[SampledToken]) -> list[SampledToken]:
    """Return the valid sampled tokens, up to and including the first that ends the answer.

    A sampled token is valid if all draft tokens before it were correct.

    Args:
        sequence: the sequence that the chunk belongs to.
        chunk: the chunk, which ends with the draft.
        drawn: the sampled tokens, one for each draft token and one that follows the draft.
    """
    tokens: list[SampledToken] = []
    draft = chunk.token_ids[len(chunk.token_ids) - len(drawn) + 1 :]
    for place, token in enumerate(drawn):
        tokens.append(token)
        is_end = token.token_id in sequence.request.stop_token_ids
        if is_end or place == len(draft) or draft[place] != token.token_id:
            break
    return tokens
