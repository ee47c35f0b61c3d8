"""Slots for the convolution states of sequences.

States are immutable: a step reads one slot and writes the next state to another slot. A failed step
can therefore be retried, and forked sequences can share a state. A running sequence needs at most
two slots, so the pool has two slots per sequence that may run. A waiting sequence keeps its state
until another sequence needs the slot.

The prefix cache and host memory store KV but no convolution states. A missing state is rebuilt by
replaying earlier tokens: they are recomputed from a zero state, while attention reads their stored
KV. The rebuilt state is exact once `replay_tokens` tokens have been replayed, or if the replay
began at the start of the sequence. A replay may take several steps.
"""

from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.protocol.step_plan import Chunk, state_slots
from ullage_engine.scheduler.sequence import ConvState, Sequence
from ullage_engine.scheduler.sequence_table import SequenceTable


class ConvStatePool:
    """Assigns convolution state slots to sequences. Models without convolutions have none."""

    def __init__(self, replay_tokens: int, max_sequences: int, sequences: SequenceTable) -> None:
        self.replay_tokens = replay_tokens
        num_slots = state_slots(max_sequences) if replay_tokens else 0
        self._slots = BlockPool(num_slots, block_tokens=1)
        self._sequences = sequences

    def next_position(self, sequence: Sequence) -> int:
        """Return the position of the first token that the next step computes.

        If the state is missing, the position is before `num_computed`, because earlier tokens must
        be replayed to rebuild the state.
        """
        if not self.replay_tokens:
            return sequence.num_computed
        state = sequence.conv.state
        if state and self._is_usable(state, sequence.num_computed):
            return state.num_tokens
        return max(0, sequence.num_computed - self.replay_tokens)

    def assign_slots(self, sequence: Sequence) -> tuple[int | None, int]:
        """Assign the convolution state slots that a planned chunk reads and writes.

        Returns:
            Two slots: the one that the chunk reads, or None for the zero state, and the one to
            which it writes the next state.
        """
        if not self.replay_tokens:
            return None, 0

        conv = sequence.conv
        if conv.next_slot is None:
            self._free_a_slot()
            [conv.next_slot] = self._slots.allocate(1)

        is_usable = conv.state is not None and self._is_usable(conv.state, sequence.num_computed)
        return conv.state.slot if conv.state and is_usable else None, conv.next_slot

    def commit(self, sequence: Sequence, chunk: Chunk) -> None:
        """Replace the sequence's current state with the state written by a computed chunk."""
        slot = sequence.conv.next_slot
        if slot is None:
            return

        previous = sequence.conv.state
        is_continued = previous is not None and chunk.state_slot is not None
        since = previous.since if previous and is_continued else chunk.start
        sequence.conv.next_slot = None
        self._drop(sequence)
        sequence.conv.state = ConvState(slot, chunk.end, since)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's state with a child that has forked from it.

        If the state already includes tokens beyond the child's `num_computed`, it is not shared.
        """
        state = parent.conv.state
        if state and state.num_tokens <= child.num_computed:
            self._slots.share([state.slot])
            child.conv.state = state

    def release_next(self, sequence: Sequence) -> None:
        """Free the slot that was assigned for a sequence's next state, without using it."""
        if sequence.conv.next_slot is not None:
            self._slots.free([sequence.conv.next_slot])
            sequence.conv.next_slot = None

    def release(self, sequence: Sequence) -> None:
        """Free all convolution state slots of a sequence that ends."""
        self.release_next(sequence)
        self._drop(sequence)

    def check_integrity(self) -> None:
        """Assert that no slot is leaked, and that no slot is both read and written."""
        conv_slots = [each.conv for each in self._sequences]
        states = [each.state.slot for each in conv_slots if each.state]
        written = [each.next_slot for each in conv_slots if each.next_slot is not None]
        self._slots.check_integrity([states, written])

        waiting = [each for each in self._sequences if not each.is_running]
        assert all(each.conv.next_slot is None for each in waiting), "a waiting sequence has one"
        assert len(set(written)) == len(written), "two sequences write to one slot"
        assert not set(written) & set(states), "a state is overwritten"

    def _is_usable(self, state: ConvState, num_computed: int) -> bool:
        """Return whether a sequence may continue from this state, instead of replaying from zero.

        Continuing must yield the exact state at `num_computed`, and must not compute more tokens
        than a replay from the zero state would.
        """
        zero = max(0, num_computed - self.replay_tokens)
        return state.since <= zero <= state.num_tokens <= num_computed

    def _free_a_slot(self) -> None:
        """Drop states of waiting sequences, least important first, until a slot is free."""
        for sequence in reversed(list(self._sequences)):
            if self._slots.num_free:
                return
            if not sequence.is_running:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence.conv.state:
            self._slots.free([sequence.conv.state.slot])
            sequence.conv.state = None
