"""State transitions of sequences and their resources: start, preemption, fork and removal.

Each transition updates blocks, reservations, slots and tables together. The order matters. For
example, blocks are freed only after copies from them have been planned.
"""

from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.state import SchedulerState
from ullage_engine.scheduler.stats import SchedulerStatistics


class Lifecycle:
    """Starts, preempts, forks and removes sequences, together with their resources."""

    def __init__(
        self, state: SchedulerState, statistics: SchedulerStatistics, events: RequestEvents
    ) -> None:
        self._state = state
        self._cache = state.cache
        self._reservations = state.reservations
        self._sequences = state.sequences
        self._fork_groups = state.fork_groups
        self._swap = state.swap
        self._conv_states = state.conv_states
        self._tiers = state.tiers
        self._statistics = statistics
        self._events = events

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the batch. Its reservation must have been granted."""
        # Cached blocks first, so that their KV is not copied in from the host.
        self._reservations.add_cached(sequence)

        if sequence.cached_prompt_tokens is None:
            num_hits = sequence.num_computed
            sequence.cached_prompt_tokens = min(num_hits, sequence.request.num_prompt_tokens)
            self._statistics.figures.observe_start(sequence.request.accepted_at)
            if self._cache.has_cache:
                self._statistics.prefix_lookup_tokens += len(sequence.token_ids)
                self._statistics.prefix_hit_tokens += num_hits
        self._events.on_started(sequence.request, sequence.num_computed)

        if self._tiers and not (sequence.swapped or sequence.is_scoring):
            self._tiers.ask(sequence)
        self._swap.swap_in(sequence, self._reservations)
        self._sequences.start(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's memory, and make it wait for a new reservation."""
        # Before the blocks are freed, because the copy to the host reads them.
        if not (self._tiers and self._tiers.forget(sequence)):
            self._swap.swap_out(sequence)
        self._conv_states.release_next(sequence)
        self._sequences.stop(sequence)

        sequence.num_preemptions += 1
        self._statistics.num_preemptions += 1
        is_swapped = bool(sequence.swapped)
        self._events.on_preempted(sequence.request, sequence.num_preemptions, is_swapped)

        # The sequence outlived its estimate: reserve for its output so far and another usual one.
        sequence.expected_output = sequence.num_output + self._state.output_lengths.estimate
        self._reservations.defer(sequence)
        # Children cannot start before their parent, and their reservations might take the blocks
        # that it needs to start.
        for child in self._fork_groups.children(sequence):
            self._reservations.defer(child)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a waiting child share the KV of its parent's first `num_tokens` tokens.

        If this is impossible, the child's reservation is deferred. See `BlockReservations.fork`.
        """
        if self._reservations.fork(parent, child, num_tokens, self._sequences):
            self._conv_states.share(parent, child)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or was cancelled, and free all its resources."""
        path = sequence.blocks.ids[: sequence.num_cached_blocks]
        orphans = self._fork_groups.remove(sequence)

        if self._state.speculation:
            self._state.speculation.forget(sequence)
        if self._tiers:
            self._tiers.forget(sequence)
        self._swap.free_slots(sequence)
        self._reservations.release(sequence)
        # After the release, whose tick counts as the session's last use.
        if sequence.request.session_id and path:
            self._cache.keep_session(sequence.request.session_key, path)
        self._conv_states.release(sequence)
        self._sequences.remove(sequence)

        for planned in self._state.in_flight:
            entry = planned.entries.get(sequence.request_id)
            if entry and entry[0] is sequence:
                del planned.entries[sequence.request_id]
                planned.cancelled.append(sequence)

        # Their reservations counted on sharing blocks with the parent that is gone.
        for child in orphans:
            self._reservations.defer(child)
