"""Samples of one prompt: the first computes what all have in common, the others fork from it."""

from ullage_engine.core.chunks import common_prefix
from ullage_engine.core.request import EngineRequest
from ullage_engine.core.sequence import Sequence


class Groups:
    """Who waits to fork from whom.

    A follower waits until its leader has computed the tokens they share. When the leader goes
    before that, the most important follower takes its place.
    """

    def __init__(self) -> None:
        self._followers: dict[Sequence, list[Sequence]] = {}

    def form(self, leader: Sequence, followers: list[Sequence], num_shared: int) -> None:
        """Makes `followers` wait for the leader's first `num_shared` tokens."""
        leader.has_followers = bool(followers)
        for follower in followers:
            follower.leader, follower.num_shared = leader, num_shared
        if followers:
            self._followers[leader] = followers

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Those that wait for the leader, by importance."""
        return list(self._followers.get(leader, ()))

    def take_ready(self, leader: Sequence) -> list[Sequence]:
        """Followers that can fork now; they are on their own from here on."""
        ready = self._followers.get(leader)
        if not ready or leader.num_computed < ready[0].num_shared:
            return []
        del self._followers[leader]
        leader.has_followers = False
        for follower in ready:
            follower.leader = None
        return ready

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Forgets a sequence; the followers it leaves, the first of them now their leader."""
        if sequence.leader:
            self._leave(sequence, sequence.leader)
        left = self._followers.pop(sequence, [])
        if left:
            new, *others = left
            new.leader = None
            self.form(new, others, new.num_shared)
        return left

    def _leave(self, follower: Sequence, leader: Sequence) -> None:
        left = [each for each in self._followers[leader] if each is not follower]
        follower.leader = None
        leader.has_followers = bool(left)
        if left:
            self._followers[leader] = left
        else:
            del self._followers[leader]


def shared_tokens(requests: list[EngineRequest]) -> int:
    """Tokens whose KV all of these requests have in common.

    The last token of each is left to itself, because every one needs its output.
    """
    first, *others = [request.token_ids for request in requests]
    shared = min(len(tokens) for tokens in [first, *others]) - 1
    return min([shared, *(common_prefix(first, tokens) for tokens in others)])
