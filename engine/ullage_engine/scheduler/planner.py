"""Decides which tokens the next step computes, preempting sequences if blocks run out."""

from itertools import compress

from ullage_engine.protocol.step_plan import Chunk
from ullage_engine.scheduler.batch_plan import (
    Planned,
    PromptBudget,
    make_chunk,
    make_decode,
    postponed_decodes,
)
from ullage_engine.scheduler.lifecycle import Lifecycle
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.state import SchedulerState


class BatchPlanner:
    """Builds the chunks of a step and allocates their blocks and slots."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._limits = state.limits
        self._cache = state.cache
        self._reservations = state.reservations
        self._sequences = state.sequences
        self._fork_groups = state.fork_groups
        self._swap = state.swap
        self._conv_states = state.conv_states
        self._tiers = state.tiers
        self._is_plain = state.is_plain
        self._read_bytes = state.profile.decode_read_bytes
        self._max_read_bytes = state.limits.decode_tokens * self._read_bytes(1)

    def plan(self, prompt_tokens: int, is_chunked: bool) -> list[Chunk]:
        """Plan a step for the running sequences.

        Unless it has no chunks, the plan is in flight from then on.

        Args:
            prompt_tokens: maximum number of prompt tokens that the step computes.
            is_chunked: whether the step may compute part of a prompt.

        Returns:
            The chunks, decodes first.
        """
        running, max_decodes = self._candidates()
        decodable = [each.is_decoding for each in running]
        if self._conv_states.replay_tokens:
            decodable = [self._can_decode(each) for each in running]
        ready = list(compress(running, decodable))
        postponed = postponed_decodes(ready, max_decodes, self._max_read_bytes, self._read_bytes)

        drafts: dict[Sequence, list[int]] = {}
        if self._state.speculation and not postponed:
            drafts = self._state.speculation.draft(ready, self._sequences.num_running)

        budget = PromptBudget(prompt_tokens, is_chunked, self._limits.prompt_cost)
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        entries: dict[str, tuple[Sequence, Chunk]] = {}

        # The most important first. A sequence preempted for another's block is less important, so
        # it is not planned yet.
        for sequence, is_decode in zip(running, decodable, strict=True):
            # A more important sequence of this loop may have preempted this one.
            if not sequence.is_running or sequence.request_id in postponed:
                continue

            if drafts and sequence in drafts:
                chunk = self._chunk(sequence, sequence.num_computed, 1, drafts[sequence])
            elif is_decode:
                chunk = self._decode(sequence)
            else:
                start = self._conv_states.next_position(sequence)
                count = budget.share(start, self._end(sequence) - start)
                chunk = self._chunk(sequence, start, count)
            if chunk is None:
                continue

            entries[sequence.request_id] = (sequence, chunk)
            if is_decode:
                decodes.append(chunk)
            else:
                prompts.append(chunk)
                budget.take(start, count)

        if entries:
            scores = any(chunk.targets is not None for chunk in prompts)
            self._state.in_flight.append(Planned(entries, [], scores=scores))
        return decodes + prompts

    def _candidates(self) -> tuple[list[Sequence], int]:
        """Return the sequences that the step may compute, and how many of them may decode."""
        running = self._sequences.running
        max_decodes = self._limits.max_decodes

        if self._limits.max_in_flight > 1:
            # Decodes are spread evenly over the plans in flight.
            num_decoding = sum(each.is_decoding for each in running)
            max_decodes = min(max_decodes, -(-num_decoding // self._limits.max_in_flight))
            in_flight = self._state.sequences_in_flight()
            running = [each for each in running if each not in in_flight]
        return self._present(running), max_decodes

    def _present(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose KV is already on the device.

        Sequences that are waiting for the answer to a KV query are left out. If the KV of every
        other sequence has yet to be copied to the device, there is nothing else to compute. These
        sequences are then returned anyway, and the step waits for the copies.
        """
        if self._tiers:
            running = [each for each in running if not self._tiers.is_waiting(each)]

        # KV is copied in while this step runs, unless there is nothing else to compute.
        present = running
        if self._swap.has_arriving:
            present = [each for each in present if not self._swap.is_arriving(each)]
        if self._tiers:
            present = [each for each in present if not self._tiers.is_arriving(each)]
        return present or running

    def _chunk(
        self, sequence: Sequence, start: int, count: int, draft: list[int] | None = None
    ) -> Chunk | None:
        """Make a chunk of `count` tokens, or return None if `count` is 0 or no blocks are free."""
        end = start + count + len(draft or ())
        if not count or (end > sequence.num_writable and not self._allocate(sequence, start, end)):
            return None
        slots = self._conv_states.assign_slots(sequence)
        return make_chunk(sequence, start, count, slots, draft)

    def _decode(self, sequence: Sequence) -> Chunk | None:
        """Make a decode chunk, or return None if there is no free block for its token."""
        start = sequence.num_computed
        if start < sequence.num_writable and self._is_plain:
            return make_decode(sequence)
        return self._chunk(sequence, start, 1)

    def _can_decode(self, sequence: Sequence) -> bool:
        """Return whether computing a single token is enough to sample the next one.

        If earlier tokens must first be replayed to rebuild a convolution state, they count as
        prompt tokens and the result is False.
        """
        start = self._conv_states.next_position(sequence)
        return sequence.is_decoding and start == sequence.num_computed

    def _end(self, sequence: Sequence) -> int:
        """Return the position up to which this step may compute the sequence's tokens.

        A parent with a convolution state stops where its children fork, because they can only
        continue from the state at that position. A sequence whose later KV is being loaded stops
        where the loaded KV begins.
        """
        end = self._tiers.end(sequence) if self._tiers else len(sequence.token_ids)
        children = self._fork_groups.children(sequence) if self._conv_states.replay_tokens else []
        if children:
            num_shared = children[0].fork.num_shared_tokens
            if sequence.num_computed < num_shared:
                return min(end, num_shared)
        return end

    def _allocate(self, sequence: Sequence, start: int, end: int) -> bool:
        """Allocate blocks for tokens `start` to `end`, preempting other sequences if necessary.

        The least important running sequences are preempted first. A sequence in flight cannot be
        preempted before its plan is committed.

        Returns:
            Whether the blocks were allocated. If not, this sequence has been preempted itself, or
            the next sequence to preempt is in flight.
        """
        size = self._cache.block_tokens
        first = sequence.num_computed // size
        self._reservations.slide_window(sequence, start)
        blocks = sequence.blocks
        windows = sequence.windows

        num_blocks = -(-end // size)
        num_missing = max(0, num_blocks - len(blocks.ids))
        num_missing_windows = max(0, num_blocks - windows.end) if self._cache.is_windowed else 0

        while True:
            # Checked in every round: a preempted sequence may have been the other holder.
            is_shared = self._cache.is_shared_at(blocks.ids, first)
            is_window_shared = self._cache.is_shared_at(windows.ids, first - windows.first)
            count = num_missing + num_missing_windows + is_shared + is_window_shared
            taken = self._reservations.take(sequence, count, self._sequences)
            if taken is not None:
                break

            victim = self._sequences.newest_running
            assert victim is not None, "a running sequence found none to preempt"
            if victim in self._state.sequences_in_flight():
                return False
            self._lifecycle.preempt(victim)
            if victim is sequence:
                return False

        # Copy on write: a block that others read, too, is replaced by a copy.
        if is_shared:
            blocks.ids = self._swap.copy_shared(blocks.ids, first, taken.pop(0))
        if is_window_shared:
            index = first - windows.first
            windows.ids = self._swap.copy_shared(windows.ids, index, taken.pop(0))

        if taken:
            # In place, as a step's chunks hold the list while its entries do not change.
            blocks.ids += taken[:num_missing]
            windows.ids = windows.ids + taken[num_missing:]
        if not self._cache.is_windowed:
            sequence.num_writable = len(blocks.ids) * size
        return True
