"""All admitted sequences, by id and by importance."""

import bisect
from collections.abc import Iterator

from ullage_engine.core.sequence import Sequence


class Roster:
    """Sequences that are running or waiting; iterates from the most important on."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_rank: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> Sequence:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._by_rank if sequence.is_running]

    @property
    def num_running(self) -> int:
        return sum(sequence.is_running for sequence in self._by_rank)

    @property
    def num_waiting(self) -> int:
        return len(self._by_rank) - self.num_running

    @property
    def newest_running(self) -> Sequence | None:
        """The least important one that runs."""
        return next((each for each in reversed(self._by_rank) if each.is_running), None)

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.request_id] = sequence
        bisect.insort(self._by_rank, sequence, key=lambda each: each.rank)

    def remove(self, sequence: Sequence) -> None:
        del self._by_id[sequence.request_id]
        self._by_rank.remove(sequence)

    def check_integrity(self) -> None:
        assert len(self._by_rank) == len(self._by_id), "sequences lost or doubled"
        ranks = [sequence.rank for sequence in self._by_rank]
        assert ranks == sorted(set(ranks)), "sequences out of order"
