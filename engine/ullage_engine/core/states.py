"""Which slots hold convolution states, and what is computed again where a state is missing.

A state is a value: a step reads it in one slot and writes its successor to another. So a step that
failed is computed again from what it began with, and sequences that branch share a state. Each
running sequence needs at most two slots, and there are two for each that may run; those that wait
keep their state as long as nobody needs its slot.

The prefix cache and the host hold KV and no states. Computing tokens again from zero state, while
attention reads their KV as stored, makes the state exact after `replay_tokens` of them (or at the
sequence's own beginning, where zero is right). A replay may take several steps.
"""

from ullage_engine.core.plan import Chunk
from ullage_engine.core.roster import Roster
from ullage_engine.core.sequence import ConvState, Sequence
from ullage_engine.kv.blocks import BlockPool
from ullage_engine.memory.predictor import state_slots


class States:
    """Convolution states of all sequences; without `replay_tokens` there are none."""

    def __init__(self, replay_tokens: int, max_sequences: int, roster: Roster) -> None:
        self.replay_tokens = replay_tokens
        num_slots = state_slots(max_sequences) if replay_tokens else 0
        self._slots = BlockPool(num_slots, block_tokens=1)
        self._roster = roster

    def start(self, sequence: Sequence) -> int:
        """Position that the sequence has to be computed from; less than `num_computed` where its
        state has to be rebuilt."""
        if not self.replay_tokens:
            return sequence.num_computed
        if sequence.state and self._is_usable(sequence.state, sequence.num_computed):
            return sequence.state.num_tokens
        return max(0, sequence.num_computed - self.replay_tokens)

    def assign(self, sequence: Sequence) -> tuple[int | None, int]:
        """Slots of a planned chunk: of the state it begins with, None for zero, and of the next."""
        if not self.replay_tokens:
            return None, 0
        if sequence.next_slot is None:
            self._make_room()
            [sequence.next_slot] = self._slots.allocate(1)
        state = sequence.state
        is_usable = state is not None and self._is_usable(state, sequence.num_computed)
        return state.slot if state and is_usable else None, sequence.next_slot

    def commit(self, sequence: Sequence, chunk: Chunk) -> None:
        """Takes over the state that a computed chunk has written."""
        if sequence.next_slot is None:
            return
        before, slot = sequence.state, sequence.next_slot
        is_continued = before is not None and chunk.state_slot is not None
        since = before.since if before and is_continued else chunk.start
        sequence.next_slot = None
        self._drop(sequence)
        sequence.state = ConvState(slot, chunk.end, since)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Gives a child that shares the parent's first `num_computed` tokens its state, too, unless
        that is already for later ones."""
        if parent.state and parent.state.num_tokens <= child.num_computed:
            self._slots.share([parent.state.slot])
            child.state = parent.state

    def stop(self, sequence: Sequence) -> None:
        """Takes the slot that the sequence would have written next."""
        if sequence.next_slot is not None:
            self._slots.free([sequence.next_slot])
            sequence.next_slot = None

    def release(self, sequence: Sequence) -> None:
        """Takes all slots of a sequence that ends."""
        self.stop(sequence)
        self._drop(sequence)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or held, and that no state was written that is read."""
        states = [each.state.slot for each in self._roster if each.state]
        written = [each.next_slot for each in self._roster if each.next_slot is not None]
        self._slots.check_integrity([states, written])
        waiting = [each for each in self._roster if not each.is_running]
        assert all(each.next_slot is None for each in waiting), "a slot for no step"
        assert len(set(written)) == len(written), "two sequences write to one slot"
        assert not set(written) & set(states), "a state is overwritten"

    def _is_usable(self, state: ConvState, num_computed: int) -> bool:
        """Whether going on from the state makes one that is exact at `num_computed`, and computes
        no more tokens than beginning from zero would."""
        zero = max(0, num_computed - self.replay_tokens)
        return state.since <= zero <= state.num_tokens <= num_computed

    def _make_room(self) -> None:
        """Frees a slot, if there is none, that a waiting sequence keeps a state in."""
        for sequence in reversed(list(self._roster)):
            if self._slots.num_free:
                return
            if not sequence.is_running:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state:
            self._slots.free([sequence.state.slot])
            sequence.state = None
