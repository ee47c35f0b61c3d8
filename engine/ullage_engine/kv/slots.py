"""Host memory for swapped sequences, as numbers."""

from collections.abc import Iterable


class HostSlots:
    """Slots of one block each, reserved before serving starts."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Asserts that every slot is either free or held, once."""
        every = sorted([*self._free, *held])
        assert every == list(range(self.num_slots)), "host slots lost or doubled"
