"""A table of all admitted sequences, ordered by importance."""

import bisect
import operator
from collections.abc import Iterator

from ullage_engine.scheduler.sequence import Backlog, Sequence

_rank_of = operator.attrgetter("rank")


class SequenceTable:
    """All admitted sequences, by request id. Iteration yields the most important sequence first.

    The table keeps running totals that steps and reports read in constant time, regardless of the
    number of waiting sequences.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_rank: list[Sequence] = []
        self._running: list[Sequence] = []
        self._backlog = Backlog()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> Sequence:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Sequence | None:
        """Return a request's sequence, or None for an unknown id."""
        return self._by_id.get(request_id)

    @property
    def running(self) -> list[Sequence]:
        """Return the running sequences, most important first."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._by_rank) - len(self._running)

    @property
    def newest_running(self) -> Sequence | None:
        """Return the least important running sequence, or None if none is running."""
        return self._running[-1] if self._running else None

    @property
    def num_backlog_tokens(self) -> int:
        """Return how many tokens must still be computed before all sequences can decode."""
        return self._backlog.num_tokens

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence to the table."""
        most = sequence.request.num_prompt_tokens + sequence.request.max_tokens
        sequence.max_length = min(sequence.limit, most)

        self._by_id[sequence.request_id] = sequence
        bisect.insort(self._by_rank, sequence, key=_rank_of)

        sequence.backlog = self._backlog
        self._backlog.num_tokens += sequence.num_prefill

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the running batch."""
        sequence.is_running = True
        bisect.insort(self._running, sequence, key=_rank_of)

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence from the running batch if it is running."""
        if sequence.is_running:
            sequence.is_running = False
            self._running.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence from the table."""
        self.stop(sequence)
        del self._by_id[sequence.request_id]
        self._by_rank.remove(sequence)
        self._backlog.num_tokens -= sequence.num_prefill
        sequence.backlog = None

    def check_integrity(self) -> None:
        """Assert that the order, the batch and the backlog are consistent with the sequences."""
        assert len(self._by_rank) == len(self._by_id), "sequences lost or doubled"
        running = [sequence for sequence in self._by_rank if sequence.is_running]
        assert running == self._running, "running sequences lost or doubled"

        for each in self._by_rank:
            is_decoding = each.num_computed > 0 and each.num_remaining == 1
            assert each.is_decoding == is_decoding, f"{each.request_id}: decodes or does not"

        num_prefill = sum(sequence.num_prefill for sequence in self._by_rank)
        assert num_prefill == self._backlog.num_tokens, f"{num_prefill} tokens to compute"

        ranks = [sequence.rank for sequence in self._by_rank]
        assert ranks == sorted(set(ranks)), "sequences out of order"
