"""Beam searches in progress: every beam is a sequence, and all beams of a search step together.

A search is admitted as `width` samples of its prompt would be, and begins with one of them. Then a
sequence is one beam for one step: it computes its last token and tells the likeliest next ones.
When all beams of a search have told theirs the search advances: the beams that go on branch off
from those they extend, and the old ones end. A beam that had to wait for memory is waited for;
whoever went on meanwhile went a token too far at most, and what it said about that is not heard.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ullage_engine.core.beam import BeamRules, Candidate, Hypothesis, Search, advance
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.messages import Rejected, RequestFailed, TokenLogprobs, TokenOutput

_TOKENS_OF_A_SEQUENCE = 2
"""Its own step's and one that it may go too far: so it is still there when others branch off."""


class Branches(Protocol):
    """Sequences that can branch."""

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admits samples of one prompt together, or refuses all of them.

        The answer has an output for each sample of which nothing is left to produce.
        """
        ...

    def fork(self, parent_id: str, child: EngineRequest) -> None:
        """Starts `child` with the KV that its tokens have in common with a parent's, if that is
        still there. It may have to wait for memory but is not refused it."""
        ...

    def cancel(self, request_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Group:
    """One search: its requests from the best hypothesis to the worst, and its state."""

    requests: list[EngineRequest]
    rules: BeamRules
    state: Search = field(default_factory=Search)
    num_steps: int = 0
    members: list[str] = field(default_factory=list)
    """Sequences of the beams, in their order."""
    heard: dict[str, list[Candidate]] = field(default_factory=dict)
    is_full: bool = False
    """The longest sequence that the engine holds is reached."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    open_ids: set[str] = field(default_factory=set)
    """Requests that are not cancelled."""

    @property
    def first(self) -> EngineRequest:
        return self.requests[0]

    @property
    def num_told(self) -> int:
        """Alternatives to each token that the client wants to be told."""
        return self.first.sampling.top_logprobs or 0

    def roots(self) -> list[EngineRequest]:
        """As many samples of the prompt as there may be beams."""
        return [self._sequence(i, [], self.first.max_tokens) for i in range(self.rules.width)]

    def beam(self, place: int, token_ids: list[int]) -> EngineRequest:
        """The request of one beam's next step."""
        max_tokens = len(token_ids) + _TOKENS_OF_A_SEQUENCE
        return self._sequence(place, token_ids, min(self.first.max_tokens, max_tokens))

    def _sequence(self, place: int, token_ids: list[int], max_tokens: int) -> EngineRequest:
        return msgspec.structs.replace(
            self.first,
            request_id=f"{self.first.request_id}~{self.num_steps}.{place}",
            token_ids=self.first.token_ids + token_ids,
            max_tokens=max_tokens,
            sampling=SamplingParams(
                temperature=0.0, top_logprobs=max(self.rules.num_candidates, self.num_told)
            ),
            # It must not end before the others: what ends a hypothesis is the search's business.
            stop_token_ids=[],
            # The likeliest beam is what the session goes on from.
            session_id="" if place else self.first.session_id,
            beam=None,
        )

    def hear(self, output: TokenOutput) -> bool:
        """Takes what a beam's sequence says; whether the search can advance."""
        if output.request_id in self.heard or output.logprobs is None:
            return False
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions += output.num_preemptions
        self.is_full = self.is_full or output.finish != ""
        self.heard[output.request_id] = self._candidates(output.logprobs[0])
        return len(self.heard) == len(self.members)

    def advance(self) -> None:
        candidates = [self.heard[member] for member in self.members]
        self.state = advance(self.state, candidates, self.rules, is_last=self.is_full)
        self.num_steps += 1
        self.heard = {}

    def outputs(self) -> list[TokenOutput]:
        """The best hypotheses, one for each request."""
        assert len(self.state.finished) >= len(self.requests), "fewer hypotheses than requests"
        found = zip(self.requests, self.state.finished, strict=False)
        return [self._output(request, hypothesis) for request, hypothesis in found]

    def _output(self, request: EngineRequest, hypothesis: Hypothesis) -> TokenOutput:
        is_told = request.sampling.top_logprobs is not None
        return TokenOutput(
            request_id=request.request_id,
            token_ids=hypothesis.token_ids,
            finish=hypothesis.finish,
            logprobs=[token.report for token in hypothesis.tokens] if is_told else None,
            num_preemptions=self.num_preemptions if request is self.first else 0,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def _candidates(self, found: TokenLogprobs) -> list[Candidate]:
        """The likeliest next tokens, each with what a client is told if it is chosen."""
        told = found.top_ids[: self.num_told], found.top_logprobs[: self.num_told]
        likeliest = zip(found.top_ids, found.top_logprobs, strict=True)
        return [Candidate(token, TokenLogprobs(logprob, *told)) for token, logprob in likeliest]


class BeamSearches:
    """All searches of one engine, between its scheduler and whoever reads its output."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches
        self._groups: dict[str, _Group] = {}
        self._by_member: dict[str, _Group] = {}

    def start(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Starts one search for all its requests, or refuses it by naming the first.

        The answer is what is known at once: nothing, or the end of requests that have no room left.
        """
        group = _new_group(requests)
        root, *others = group.roots()
        answer = self._branches.submit_group([root, *others], resumed=resumed)
        if isinstance(answer, Rejected):
            return msgspec.structs.replace(answer, request_id=group.first.request_id)
        if answer:
            ids = [request.request_id for request in requests]
            return [msgspec.structs.replace(answer[0], request_id=each) for each in ids]
        for other in others:
            self._branches.cancel(other.request_id)
        self._groups |= dict.fromkeys(group.open_ids, group)
        self._join(group, [root.request_id])
        return []

    def take(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Keeps what sequences of beams say and passes on the rest, and searches that are over."""
        passed = [each for each in outputs if each.request_id not in self._by_member]
        for output in outputs:
            group = self._by_member.get(output.request_id)
            if group is not None and group.hear(output):
                passed += self._advance(group)
        return passed

    def cancel(self, request_id: str) -> bool:
        """Whether it was a search's request; the search ends when nobody waits for it any more."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        group.open_ids.discard(request_id)
        if not group.open_ids:
            self._end(group)
        return True

    def fail(self, failed: RequestFailed) -> list[RequestFailed]:
        """A beam's sequence that failed fails all requests of its search; others pass."""
        group = self._by_member.get(failed.request_id)
        if group is None:
            return [failed]
        self._end(group)
        return [
            RequestFailed(request_id=request.request_id, message=failed.message)
            for request in group.requests
        ]

    def _advance(self, group: _Group) -> list[TokenOutput]:
        group.advance()
        if group.state.is_over:
            self._end(group)
            return group.outputs()
        parents, beams = group.members, group.state.beams
        fruitful = {parents[beam.parent] for beam in beams}
        # First those that nobody goes on from, so that their memory is there for the others.
        self._leave([parent for parent in parents if parent not in fruitful])
        children = [group.beam(place, beam.token_ids) for place, beam in enumerate(beams)]
        for beam, child in zip(beams, children, strict=True):
            self._branches.fork(parents[beam.parent], child)
        self._leave(sorted(fruitful))
        self._join(group, [child.request_id for child in children])
        return []

    def _join(self, group: _Group, members: list[str]) -> None:
        group.members = members
        self._by_member |= dict.fromkeys(members, group)

    def _leave(self, members: list[str]) -> None:
        for member in members:
            del self._by_member[member]
            self._branches.cancel(member)

    def _end(self, group: _Group) -> None:
        self._leave(group.members)
        for request in group.requests:
            del self._groups[request.request_id]


def _new_group(requests: list[EngineRequest]) -> _Group:
    first = requests[0]
    assert first.beam is not None, "a search without its width"
    rules = BeamRules(
        width=first.beam.width,
        length_penalty=first.beam.length_penalty,
        stop_token_ids=frozenset(first.stop_token_ids),
        max_tokens=first.max_tokens,
    )
    return _Group(requests, rules, open_ids={request.request_id for request in requests})
