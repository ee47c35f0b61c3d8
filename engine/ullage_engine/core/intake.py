"""Prices requests against what is free and lets them in."""

from collections.abc import Iterator

from ullage_engine.core.admission import Room, refuse_double, refuse_forever, refuse_now
from ullage_engine.core.groups import Groups, shared_tokens
from ullage_engine.core.limits import SchedulerLimits
from ullage_engine.core.pace import Pace
from ullage_engine.core.request import EngineRequest
from ullage_engine.core.roster import Roster
from ullage_engine.core.sequence import Sequence
from ullage_engine.kv.store import KvStore
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.predictor import block_bytes, sample_blocks
from ullage_engine.memory.promises import Promises
from ullage_engine.messages import Profile, Rejected

_WAITING_PER_RUNNING = 4
"""Size of the waiting room in batches; whoever comes later is better queued by the router."""


class Intake:
    """Turns requests into sequences with a promise, or into refusals."""

    def __init__(
        self,
        profile: Profile,
        limits: SchedulerLimits,
        pace: Pace,
        expected: ExpectedOutput,
        store: KvStore,
        promises: Promises,
        roster: Roster,
        groups: Groups,
    ) -> None:
        self._profile = profile
        self._limits = limits
        self._pace = pace
        self._expected = expected
        self._store = store
        self._promises = promises
        self._roster = roster
        self._groups = groups
        self._num_submitted = 0

    def submit(self, requests: list[EngineRequest], resumed: bool) -> Rejected | None:
        """Admits samples of one prompt together, or refuses all and keeps nothing.

        Resumed ones are refused only if they are invalid; they may have to wait for their promise.
        """
        group = self._group(requests)
        if not resumed or not all(request.token_ids for request in requests):
            refusal = self._refusal(requests, group)
            if refusal:
                return refusal
        self._admit(group)
        return None

    def refuse_used(self, requests: list[EngineRequest]) -> Rejected | None:
        """Refuses ids that are in use, be it by one another."""
        ids = [request.request_id for request in requests]
        for request in requests:
            if request.request_id in self._roster or ids.count(request.request_id) > 1:
                return refuse_double(request, self._profile)
        return None

    def sequence(self, request: EngineRequest, priority: int, arrival: int) -> Sequence:
        self._num_submitted += 1
        return Sequence(
            request=request,
            arrival=arrival,
            serial=self._num_submitted,
            priority=priority,
            limit=self.longest,
            expected_output=self._expected.tokens,
            token_ids=list(request.token_ids),
        )

    @property
    def longest(self) -> int:
        """Longest sequence that this pool and model hold, tokens."""
        pool_tokens = self._store.num_blocks * self._store.block_tokens
        return min(self._limits.max_model_len, pool_tokens)

    def releases(self) -> Iterator[tuple[float, int]]:
        """When each sequence is expected to give back how many bytes."""
        holders = self._store.num_holders
        for each in self._roster:
            # A block counts for all who hold it in equal parts.
            blocks = each.reserved + sum(1 / holders(block) for block in each.block_ids)
            if blocks:
                prompt = 0 if each.is_decoding else each.num_remaining
                after = self._pace.seconds_until(prompt, each.expected_remaining)
                yield after, round(blocks * block_bytes(self._profile))

    def _refusal(self, requests: list[EngineRequest], group: list[Sequence]) -> Rejected | None:
        size = block_bytes(self._profile)
        least = sum(map(self._least_blocks, group)) * size
        forever = refuse_forever(requests, self._profile, self._limits.max_model_len, least)
        if forever:
            return forever
        # What does not fit together takes turns: an empty pool admits whatever it can hold.
        blocks = sum(self._promises.price(each).total for each in group)
        needed = min(blocks, self._store.num_blocks) * size
        available = self._promises.num_available * size
        room = Room(available, self._places(len(group)), self.releases())
        return refuse_now(requests, needed, room)

    def _places(self, wanted: int) -> int:
        """Places in the waiting room; whoever is alone needs none."""
        num_waiting = self._roster.num_waiting
        left = self._limits.max_sequences * _WAITING_PER_RUNNING - num_waiting
        return left if num_waiting else max(left, wanted)

    def _least_blocks(self, sequence: Sequence) -> int:
        """What a sequence of a group needs to produce its first token."""
        return sample_blocks(
            self._store.block_tokens,
            len(sequence.token_ids) + 1,
            shared_tokens=sequence.num_shared,
            leads=sequence.has_followers,
        )

    def _group(self, requests: list[EngineRequest]) -> list[Sequence]:
        """Sequences of one arrival; followers of the first if they have anything in common."""
        arrival, priority = self._num_submitted, requests[0].priority
        leader, *others = [self.sequence(request, priority, arrival) for request in requests]
        shared = shared_tokens(requests) if others else 0
        if shared > 0:
            leader.has_followers = True
            for follower in others:
                follower.leader, follower.num_shared = leader, shared
        return [leader, *others]

    def _admit(self, group: list[Sequence]) -> None:
        leader, *others = group
        if leader.has_followers:
            self._groups.form(leader, others, others[0].num_shared)
        for sequence in group:
            self._roster.add(sequence)
            self._promises.owe(sequence)
            self._store.use_session(sequence.request.session_id)
        self._promises.restore(self._roster)
