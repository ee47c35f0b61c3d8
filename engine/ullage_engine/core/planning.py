"""Who runs, what of it is computed next, and who has to go when memory is short."""

from ullage_engine.core.chunks import make_chunk, pick_decodes, prefix_under_way, prompt_share
from ullage_engine.core.groups import Groups
from ullage_engine.core.limits import Counters, SchedulerLimits
from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.core.preemption import Mover
from ullage_engine.core.roster import Roster
from ullage_engine.core.sequence import Sequence
from ullage_engine.core.states import States
from ullage_engine.kv.store import KvStore
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.promises import Promises


class Planner:
    """Makes step plans: running sequences by importance, decodes first in the plan."""

    def __init__(
        self,
        limits: SchedulerLimits,
        expected: ExpectedOutput,
        store: KvStore,
        promises: Promises,
        mover: Mover,
        roster: Roster,
        groups: Groups,
        states: States,
        counters: Counters,
    ) -> None:
        self.planned: list[tuple[Sequence, Chunk]] = []
        """Sequences of the last plan and what of each it computes."""
        self.max_running = limits.max_sequences
        self._limits = limits
        self._expected = expected
        self._store = store
        self._promises = promises
        self._mover = mover
        self._roster = roster
        self._groups = groups
        self._states = states
        self._counters = counters

    def plan(self, prompt_tokens: int, is_chunked: bool) -> StepPlan:
        """The next step, with at most so many prompt tokens; starts sequences that wait."""
        self._start_waiting()
        chunks = self._chunks(prompt_tokens, is_chunked)
        if not chunks:
            # All that ran had to go, for more important ones that had no place in the batch.
            self._start_waiting()
            chunks = self._chunks(prompt_tokens, is_chunked)
        return StepPlan(chunks=chunks, moves=self._mover.drain())

    def replan(self, prompt_tokens: int) -> StepPlan:
        """A step of those that run already, with at most so many prompt tokens."""
        chunks = self._chunks(prompt_tokens, is_chunked=True)
        return StepPlan(chunks=chunks, moves=self._mover.drain())

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's memory; it waits until it can have all it needs at once."""
        self._mover.swap_out(sequence)
        self._states.stop(sequence)
        sequence.is_running = False
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1
        # It outlived its estimate: charge it anew for what it has and as much again as is usual.
        sequence.expected_output = sequence.num_output + self._expected.tokens
        self._promises.owe(sequence)
        # Promises to those that cannot start before it does might be what it needs to start.
        for follower in self._groups.followers(sequence):
            self._promises.owe(follower)

    def _start_waiting(self) -> None:
        """Starts sequences that wait, the most important first, as far as the batch has room."""
        self._promises.restore(self._roster)
        room = self.max_running - self._roster.num_running
        for sequence in self._roster:
            if room <= 0:
                return
            if not sequence.is_running and self._can_start(sequence):
                self._start(sequence)
                room -= 1

    def _chunks(self, prompt_tokens: int, is_chunked: bool) -> list[Chunk]:
        running = self._roster.running
        ready = [each for each in running if self._can_decode(each)]
        decoding = pick_decodes(ready, self._limits.decode_tokens)
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        self.planned = []
        # Oldest first: whoever is preempted for another's block is newer, so not yet planned.
        for sequence in running:
            start, is_decode = self._states.start(sequence), self._can_decode(sequence)
            if is_decode:
                count = 1 if sequence.request_id in decoding else 0
            else:
                count = prompt_share(self._end(sequence) - start, prompt_tokens, is_chunked)
            if not sequence.is_running or not count or not self._make_room(sequence, start + count):
                continue
            slots = self._states.assign(sequence)
            chunk = make_chunk(sequence, start, count, self._store.block_tokens, slots)
            self.planned.append((sequence, chunk))
            (decodes if is_decode else prompts).append(chunk)
            prompt_tokens -= 0 if is_decode else count
        return decodes + prompts

    def _can_decode(self, sequence: Sequence) -> bool:
        """One token gives the next; what has to be replayed before counts as prompt tokens."""
        return sequence.is_decoding and self._states.start(sequence) == sequence.num_computed

    def _end(self, sequence: Sequence) -> int:
        """How far the sequence is computed now. A leader with a state stops where its followers
        begin, which is the only place where they can go on from it."""
        followers = self._groups.followers(sequence) if self._states.replay_tokens else []
        if followers and sequence.num_computed < followers[0].num_shared:
            return followers[0].num_shared
        return len(sequence.token_ids)

    def _can_start(self, sequence: Sequence) -> bool:
        if sequence.leader or not self._promises.is_kept(sequence):
            return False
        if sequence.awaits is None and self._store.has_cache and not sequence.swapped:
            size = self._store.block_tokens
            sequence.awaits = prefix_under_way(sequence, self._roster.running, size)
        if sequence.awaits is None:
            return True
        other, tokens = sequence.awaits
        if other.is_running and other.num_computed < tokens:
            return False
        sequence.awaits = None
        return True

    def _start(self, sequence: Sequence) -> None:
        self._promises.extend(sequence)
        if sequence.cached_prompt_tokens is None:
            hits, prompt = sequence.num_computed, sequence.request.num_prompt_tokens
            sequence.cached_prompt_tokens = min(hits, prompt)
            if self._store.has_cache:
                self._counters.prefix_lookup_tokens += len(sequence.token_ids)
                self._counters.prefix_hit_tokens += hits
        self._mover.swap_in(sequence, self._promises)
        sequence.is_running = True

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Blocks that the tokens up to `end` may be written to; False: the sequence had to go."""
        size = self._store.block_tokens
        first = sequence.num_computed // size
        while True:
            table = sequence.block_ids
            missing = max(0, -(-end // size) - len(table))
            is_shared = first < len(table) and self._store.is_shared(table[first])
            blocks = self._promises.take(sequence, missing + is_shared, self._roster)
            if blocks is not None:
                break
            victim = self._roster.newest_running
            assert victim is not None, "a running sequence found none to preempt"
            self.preempt(victim)
            if victim is sequence:
                return False
        if is_shared:
            self._copy_on_write(sequence, first, blocks.pop(0))
        if blocks:
            sequence.block_ids = sequence.block_ids + blocks
        return True

    def _copy_on_write(self, sequence: Sequence, index: int, block: int) -> None:
        shared = sequence.block_ids[index]
        self._mover.copy(shared, block)
        sequence.block_ids = [*sequence.block_ids[:index], block, *sequence.block_ids[index + 1 :]]
        self._store.free([shared])
