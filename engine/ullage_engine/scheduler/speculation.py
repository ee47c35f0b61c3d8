"""Speculation by prompt lookup: a step checks tokens that followed the last ones once before.

Where few sequences decode, a step that computes a few rows takes about as long as one that computes
one. So a sequence's own text is searched for its last tokens, and the tokens behind them are
proposed. The step computes them as one chunk and samples behind each: what it draws there is the
answer's next token as long as the proposal was right up to there. Noise is a function of the seed
and the position, so the answer is the one that it would be without proposals, greedy or sampled.

The KV of rejected tokens lies behind what counts as computed, and is overwritten. Requests with a
grammar, with penalties, or of a beam search speculate nothing, because what may follow a token
depends on tokens before it in more than its KV.
"""

from collections.abc import Sequence as Tokens

from msgspec.structs import replace

from ullage_engine.protocol.step_plan import Chunk, SampledToken
from ullage_engine.scheduler.sequence import SchedulerLimits, Sequence

MAX_SPECULATING = 4
"""Sequences of which all may speculate; where more decode, rows are no longer nearly free."""

NGRAM = 3
"""Tokens at the end of a text that are looked up."""

MIN_ACCEPTANCE = 0.25
"""Share of proposed tokens that must be right lately; a sequence below it pauses."""
PAUSE_TOKENS = 64
"""Tokens that a sequence computes one by one before it tries again."""
_WEIGHT = 0.2
"""Weight of the last proposal in the running share of right ones."""


class PromptLookup:
    """Proposes what followed the last tokens of a text where they were last before.

    Every token is indexed once, so that a proposal takes as long in a long text as in a short one.
    """

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` may grow between calls, at its end."""
        self._token_ids = token_ids
        self._followed: dict[tuple[int, ...], int] = {}
        """Position behind the last occurrence of each n-gram that has a token behind it."""
        self._num_indexed = NGRAM

    def propose(self, count: int) -> list[int]:
        """Returns the `count` tokens that would come next, or none."""
        tokens = self._token_ids
        for end in range(self._num_indexed, len(tokens)):
            self._followed[tuple(tokens[end - NGRAM : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))
        start = self._followed.get(tuple(tokens[-NGRAM:]))
        if start is None:
            return []
        proposed = tokens[start : start + count]
        # What repeats itself up to the end of the text goes on with its beginning.
        period = len(tokens) - start
        while len(proposed) < count:
            proposed.append(proposed[len(proposed) - period])
        return proposed


class _Trials:
    """The proposals for one sequence, and how many of them were right lately."""

    def __init__(self, token_ids: list[int]) -> None:
        self.lookup = PromptLookup(token_ids)
        self.acceptance = 1.0
        self.paused_until = 0
        """Length in tokens at which the sequence tries again."""

    def observe(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        share = num_accepted / num_proposed
        self.acceptance += _WEIGHT * (share - self.acceptance)
        if self.acceptance < MIN_ACCEPTANCE:
            self.acceptance = MIN_ACCEPTANCE
            self.paused_until = num_tokens + PAUSE_TOKENS


class Speculation:
    """Proposes tokens for the sequences of a step, and accepts those that were sampled."""

    def __init__(self, limits: SchedulerLimits, block_tokens: int) -> None:
        assert limits.max_in_flight == 1, "a proposal follows a token that is known"
        self.num_proposed = 0
        """Tokens proposed so far."""
        self.num_accepted = 0
        self._num_tokens = limits.num_speculative_tokens
        self._max_rows = limits.max_sequences
        """Rows that steps have room for; proposals take those of sequences that are not there."""
        self._block_tokens = block_tokens
        self._trials: dict[Sequence, _Trials] = {}

    def propose(self, decoding: list[Sequence], num_running: int) -> dict[Sequence, list[int]]:
        """Returns the tokens to try behind the last one of each decoding sequence that has any."""
        if len(decoding) > MAX_SPECULATING:
            return {}
        self._trials = {each: self._trials[each] for each in decoding if each in self._trials}
        most = min(self._num_tokens, self._max_rows // max(1, num_running) - 1)
        proposals: dict[Sequence, list[int]] = {}
        for sequence in decoding:
            count = min(most, self._room(sequence))
            if count <= 0 or not may_speculate(sequence):
                continue
            trials = self._trials.setdefault(sequence, _Trials(sequence.token_ids))
            is_paused = len(sequence.token_ids) < trials.paused_until
            if not is_paused and (proposed := trials.lookup.propose(count)):
                proposals[sequence] = proposed
        return proposals

    def verify(
        self, planned: dict[str, tuple[Sequence, Chunk]], sampled: list[SampledToken]
    ) -> tuple[list[SampledToken], dict[str, list[SampledToken]]]:
        """Accepts proposed tokens of a plan, and makes it the plan of accepted ones.

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
            num_proposed = chunk.num_sampled - 1
            sequence.token_ids += [token.token_id for token in tokens[:-1]]
            computed = replace(chunk, token_ids=chunk.token_ids[: len(tokens)], num_sampled=1)
            planned[request_id] = (sequence, computed)
            drawn[request_id] = tokens
            self.num_proposed += num_proposed
            self.num_accepted += len(tokens) - 1
            trials = self._trials[sequence]
            trials.observe(num_proposed, len(tokens) - 1, len(sequence.token_ids))
        last = [tokens[-1] for tokens in drawn.values()]
        return last, {name: tokens[:-1] for name, tokens in drawn.items() if len(tokens) > 1}

    def _room(self, sequence: Sequence) -> int:
        """Counts the tokens that may be proposed: as many as are left of the answer before its
        last, in blocks that the sequence has or has reserved, so that nobody is preempted."""
        num_blocks = len(sequence.block_ids) + sequence.num_reserved
        in_blocks = num_blocks * self._block_tokens - len(sequence.token_ids)
        return min(sequence.max_length - len(sequence.token_ids) - 1, in_blocks)


def may_speculate(sequence: Sequence) -> bool:
    """Whether the next tokens depend on those before them by their KV alone."""
    request = sequence.request
    is_free = not (request.grammar or request.beam or request.sampling.is_penalised)
    return is_free and sequence.num_output >= request.min_tokens


def accepted(sequence: Sequence, chunk: Chunk, drawn: Tokens[SampledToken]) -> list[SampledToken]:
    """Returns the tokens drawn behind what was proposed rightly, up to one that ends the answer."""
    tokens: list[SampledToken] = []
    proposed = chunk.token_ids[len(chunk.token_ids) - len(drawn) + 1 :]
    for place, token in enumerate(drawn):
        tokens.append(token)
        is_end = token.token_id in sequence.request.stop_token_ids
        if is_end or place == len(proposed) or proposed[place] != token.token_id:
            break
    return tokens
