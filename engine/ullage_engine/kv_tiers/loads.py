"""Loads blocks from tiers below host memory, and chooses the blocks that are worth loading.

A request's missing blocks are split in two parts. The first part is computed while the second part
is loaded. The second part has as many blocks as are predicted to arrive before they could be
computed. Every load is timed to improve later predictions (see `cost`).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ullage_engine.kv_tiers.cost import ComputeSpeed, LoadSpeed, Needed, seconds_to_load, split
from ullage_kv import Result, Status, Store
from ullage_kv.futures import Steps, run
from ullage_kv.results import HOST

_FIRST_PART = 8
"""Divisor N: a load may be split so that the first 1/N of its blocks is loaded before the rest.

A split load yields measurements for two different sizes. Loads of fewer than N blocks are not
split."""


class Loads:
    """Starts loads and predicts when they will complete. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        call_soon: Callable[[Callable[[], None]], object],
        compute: Callable[[], ComputeSpeed],
        block_tokens: int,
        *,
        are_waited_for: bool,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Start without measurements of any tier.

        Args:
            store: the store with the lower tiers.
            call_soon: schedules a function in this object's thread. Callable from any thread.
            compute: returns the current prefill speed.
            block_tokens: tokens per block.
            are_waited_for: whether a request waits for its loads, rather than computing other
                blocks in the meantime.
            deadline_s: maximum duration of a load, in seconds.
            clock: returns the time in seconds.
        """
        self._store = store
        self._call_soon = call_soon
        self._compute = compute
        self._block_tokens = block_tokens
        self._are_waited_for = are_waited_for
        self._deadline_s = deadline_s
        self._clock = clock
        self._speeds: dict[str, LoadSpeed] = {}
        self._due: dict[bytes, float] = {}
        """Maps the key of each block that is being loaded to its predicted arrival time."""

    @property
    def num_under_way(self) -> int:
        """Number of blocks that are being loaded."""
        return len(self._due)

    def speed(self, tier: str) -> LoadSpeed:
        """Return a tier's speed tracker, creating it on first use."""
        if tier not in self._speeds:
            self._speeds[tier] = LoadSpeed(self._clock)
        return self._speeds[tier]

    def first(
        self,
        keys: Sequence[bytes],
        tiers: Sequence[str],
        num_here: int,
        windows: Sequence[bytes],
        start_s: float,
    ) -> int:
        """Return the index of the first block to load. All later blocks are loaded as well.

        The blocks to load are those predicted to arrive before they could be computed.

        Args:
            keys: keys of a prefix's blocks.
            tiers: the tier of each block.
            num_here: number of leading blocks that need not be loaded.
            windows: keys of window blocks without which the other blocks cannot be used.
            start_s: seconds until the computation can start.

        Returns:
            The index, at least `num_here`. If no block is worth loading, the index equals the
            number of blocks.
        """
        compute = self._compute()
        if not compute.tokens_per_s:
            return num_here
        seconds = seconds_to_load(
            self._needed(keys[num_here:], tiers[num_here:]),
            self._predict,
            self._needed(windows, self._store.contains(windows)),
        )
        block_s = compute.seconds(self._block_tokens)
        if not self._are_waited_for:
            return num_here + split(seconds, block_s, start_s)
        all_s = start_s + (len(keys) - num_here) * block_s
        return num_here if seconds[0] <= all_s else len(keys)

    def longest_s(self, num_lacking: int, start_s: float) -> float:
        """Return the maximum duration of a load in seconds.

        If requests wait for their loads, the duration is capped at the time it would take to
        compute the missing blocks.
        """
        if not self._are_waited_for:
            return self._deadline_s
        compute_s = self._compute().seconds(num_lacking * self._block_tokens)
        return min(self._deadline_s, start_s + compute_s)

    def load(self, keys: Sequence[bytes], longest_s: float | None = None) -> list[Future[Any]]:
        """Start loading the requested blocks that are in a lower tier but not in host memory.

        Args:
            keys: keys of the requested blocks.
            longest_s: deadline in seconds.

        Returns:
            Futures that complete when the blocks have arrived, or at the deadline.
        """
        if longest_s is None:
            longest_s = self._deadline_s
        new: dict[str, list[bytes]] = {}
        loading = []
        for key, tier in zip(keys, self._store.contains(keys), strict=True):
            if key in self._due:
                loading.append(key)
            elif tier not in ("", HOST):
                new.setdefault(tier, []).append(key)
        fetches: list[Future[Any]] = []
        if loading:
            fetches.append(self._store.fetch(loading, longest_s))
        return fetches + [self._load_from(*each, longest_s) for each in new.items()]

    def measure(self, keys: Sequence[bytes], tiers: Sequence[str]) -> None:
        """Probe tiers whose speed is unknown or was measured long ago, by loading a few blocks.

        The request that needs these blocks does not wait for the loads. It computes them.
        """
        for tier in {*tiers} - {HOST}:
            if self.speed(tier).is_to_measure:
                of_tier = [key for key, own in zip(keys, tiers, strict=True) if own == tier]
                self._fetch(tier, of_tier[-_FIRST_PART:], self._deadline_s)

    def _needed(self, keys: Sequence[bytes], tiers: Sequence[str]) -> list[Needed]:
        now = self._clock()
        needed = []
        for key, tier in zip(keys, tiers, strict=True):
            if key in self._due:
                needed.append(Needed(ready_s=max(0.0, self._due[key] - now)))
            else:
                needed.append(Needed("" if tier == HOST else tier))
        return needed

    def _predict(self, tier: str) -> Callable[[int], float]:
        """Return a function that predicts how many seconds a tier takes to load n blocks."""
        speed = self.speed(tier)
        block_bytes = self._store.block_bytes
        time_of = speed.predict()
        latency_s = speed.latency_s
        least = _FIRST_PART if speed.is_of_one_size else math.inf

        def seconds(num_blocks: int) -> float:
            own = time_of.seconds(num_blocks * block_bytes)
            return own + latency_s if num_blocks >= least else own

        return seconds

    def _load_from(self, tier: str, keys: list[bytes], longest_s: float) -> "Future[Any]":
        """Start a load. If all recent loads were of similar size, split it in two.

        Latency and bandwidth can be told apart only from loads of different sizes.
        """
        self._due |= dict.fromkeys(keys, self._clock() + self._predict(tier)(len(keys)))
        num_first = len(keys) // _FIRST_PART if self.speed(tier).is_of_one_size else 0
        if not num_first:
            return self._fetch(tier, keys, longest_s)
        return run(self._load_in_two(tier, keys, num_first, longest_s), self._call_soon)

    def _load_in_two(self, tier: str, keys: list[bytes], num_first: int, longest_s: float) -> Steps:
        """Load the first blocks, then load the remaining blocks before the same deadline."""
        ends_at = self._clock() + longest_s
        yield self._fetch(tier, keys[:num_first], longest_s)
        remaining_s = ends_at - self._clock()
        yield self._fetch(tier, keys[num_first:], remaining_s, keys[num_first - 1])

    def _fetch(
        self, tier: str, keys: list[bytes], longest_s: float, before: bytes | None = None
    ) -> "Future[list[Result]]":
        """Fetch blocks from one tier and measure how long it takes.

        Args:
            tier: name of the tier.
            keys: keys of the blocks.
            longest_s: deadline in seconds.
            before: key of the preceding block, if that block is already in host memory.
        """
        number = self.speed(tier).begin(len(keys) * self._store.block_bytes)
        fetched = self._store.fetch(keys if before is None else [before, *keys], longest_s)

        def finish() -> None:
            results = fetched.result()[-len(keys) :]
            num_hits = sum(each.status is Status.HIT for each in results)
            self.speed(tier).finish(number, num_hits * self._store.block_bytes)
            for key in keys:
                self._due.pop(key, None)

        fetched.add_done_callback(lambda _: self._call_soon(finish))
        return fetched
