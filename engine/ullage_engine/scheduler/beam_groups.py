"""Beam searches in the engine, with one sequence for each beam of a step.

To reserve enough memory, a search is admitted as `width` samples of its prompt, but starts with
only one of them. From then on, each sequence represents one beam for one step: it computes its last
token and reports the likeliest next tokens. Once all beams of a search have reported, the search
advances: new sequences fork from the beams that they extend, and the old sequences are cancelled. A
beam that waits for memory delays its whole search. In the meantime, each of the other beams
computes at most one extra token, which the search ignores.
"""

from dataclasses import dataclass, field

import msgspec

from ullage_engine.protocol.messages import Rejected, RequestFailed
from ullage_engine.protocol.requests import (
    EngineRequest,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.scheduler.beam_search import BeamRules, Candidate, Hypothesis, Search, advance
from ullage_engine.scheduler.scheduler import Scheduler

_TOKENS_OF_A_SEQUENCE = 2
"""Number of output tokens that a beam's sequence may generate.

The first is the beam's token for the current step. Room for a second one keeps the sequence alive
until the next beams have forked from it.
"""
_PROVEN_STEPS = 2
"""Number of steps after which a search reports that the worker has survived a decode step.

Until then, the server may run the search alone, because it may have killed the last worker.
"""


@dataclass(slots=True, eq=False)
class _BeamGroup:
    """The state of one beam search, together with the requests that it answers.

    Each request receives one of the hypotheses that the search finds.
    """

    requests: list[EngineRequest]
    rules: BeamRules
    state: Search = field(default_factory=Search)
    num_steps: int = 0
    members: list[str] = field(default_factory=list)
    """Request ids of the beams' sequences, in the order of the beams."""
    candidates: dict[str, list[Candidate]] = field(default_factory=dict)
    """Likeliest next tokens that beams have reported in this step so far, by the request id of the
    beam's sequence."""
    is_full: bool = False
    """Whether a beam has reached the engine's maximum sequence length."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    open_ids: set[str] = field(default_factory=set)
    """Ids of the search's requests that have not been cancelled."""

    @property
    def first(self) -> EngineRequest:
        return self.requests[0]

    @property
    def num_top_logprobs(self) -> int:
        """Number of alternatives per token that the client requested."""
        return self.first.sampling.top_logprobs or 0

    def roots(self) -> list[EngineRequest]:
        """Build the requests to admit when the search begins: `width` copies of the prompt.

        Admitting all of them reserves memory for every beam of the search.
        """
        return [self._sequence(i, [], self.first.max_tokens) for i in range(self.rules.width)]

    def beam(self, place: int, token_ids: list[int]) -> EngineRequest:
        """Build the request whose sequence computes the next step of one beam."""
        max_tokens = len(token_ids) + _TOKENS_OF_A_SEQUENCE
        return self._sequence(place, token_ids, min(self.first.max_tokens, max_tokens))

    def _sequence(self, place: int, token_ids: list[int], max_tokens: int) -> EngineRequest:
        return msgspec.structs.replace(
            self.first,
            request_id=f"{self.first.request_id}~{self.num_steps}.{place}",
            token_ids=self.first.token_ids + token_ids,
            max_tokens=max_tokens,
            accepted_at=0.0 if self.num_steps else self.first.accepted_at,
            sampling=SamplingParams(
                temperature=0.0, top_logprobs=max(self.rules.num_candidates, self.num_top_logprobs)
            ),
            # A stop token must not end the sequence: the search decides when a hypothesis ends.
            stop_token_ids=[],
            # The session continues from the likeliest beam.
            session_id="" if place else self.first.session_id,
        )

    def add_output(self, output: TokenOutput) -> bool:
        """Record a beam's output. Return whether it was the last one that the step needed."""
        if output.request_id in self.candidates or output.logprobs is None:
            return False

        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions += output.num_preemptions
        self.is_full = self.is_full or output.finish != ""
        self.candidates[output.request_id] = self._candidates(output.logprobs[0])
        return len(self.candidates) == len(self.members)

    def advance(self) -> None:
        """Advance the search by one step, using the candidates that all beams have reported."""
        candidates = [self.candidates[member] for member in self.members]
        self.state = advance(self.state, candidates, self.rules, is_last=self.is_full)
        self.num_steps += 1
        self.candidates = {}

    def progress(self) -> list[TokenOutput]:
        """Return an output without a token for each request, which reports the steps so far."""
        return [
            TokenOutput(
                request_id=request.request_id,
                token_ids=[],
                finish="",
                num_preemptions=self.num_preemptions if request is self.first else 0,
                num_cached_tokens=self.num_cached_tokens or 0,
                num_hidden=self.num_steps,
            )
            for request in self.requests
        ]

    def outputs(self) -> list[TokenOutput]:
        """Return one output per request. The first request gets the best hypothesis, and so on."""
        assert len(self.state.finished) >= len(self.requests), "fewer hypotheses than requests"
        pairs = zip(self.requests, self.state.finished, strict=False)
        return [self._output(request, hypothesis) for request, hypothesis in pairs]

    def _output(self, request: EngineRequest, hypothesis: Hypothesis) -> TokenOutput:
        has_logprobs = request.sampling.top_logprobs is not None
        return TokenOutput(
            request_id=request.request_id,
            token_ids=hypothesis.token_ids,
            finish=hypothesis.finish,
            logprobs=[token.report for token in hypothesis.tokens] if has_logprobs else None,
            num_preemptions=self.num_preemptions if request is self.first else 0,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def _candidates(self, top: TokenLogprobs) -> list[Candidate]:
        """Convert a beam's likeliest next tokens to candidates, with the logprobs to report."""
        top_ids = top.top_ids[: self.num_top_logprobs]
        top_logprobs = top.top_logprobs[: self.num_top_logprobs]
        return [
            Candidate(token, TokenLogprobs(logprob, top_ids, top_logprobs))
            for token, logprob in zip(top.top_ids, top.top_logprobs, strict=True)
        ]


class BeamSearches:
    """Manages an engine's beam searches, and replaces beams' outputs with the final answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[str, _BeamGroup] = {}
        self._by_member: dict[str, _BeamGroup] = {}

    def start(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Start a beam search whose best hypotheses answer these requests, or refuse it.

        Returns:
            If the search is refused, the refusal, which names the first request. Otherwise, the
            outputs of requests that end immediately because no further token fits.
        """
        group = _new_group(requests)
        root, *others = group.roots()
        answer = self._scheduler.submit_group([root, *others], resumed=resumed)
        if isinstance(answer, Rejected):
            return msgspec.structs.replace(answer, request_id=group.first.request_id)
        if answer:
            ids = [request.request_id for request in requests]
            return [msgspec.structs.replace(answer[0], request_id=each) for each in ids]

        # All beams were admitted, so that their memory is reserved. The search begins with one.
        for other in others:
            self._scheduler.cancel(other.request_id)
        self._groups |= dict.fromkeys(group.open_ids, group)
        self._add_members(group, [root.request_id])
        return []

    def filter_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Hide the outputs of beams, and add those of searches that have finished.

        A search that has survived a decode step reports so, without a token. Outputs of requests
        outside beam searches are passed on.
        """
        if not self._by_member:
            return outputs
        passed = [each for each in outputs if each.request_id not in self._by_member]
        for output in outputs:
            group = self._by_member.get(output.request_id)
            if group is not None and group.add_output(output):
                passed += self._advance(group)
        return passed

    def cancel(self, request_id: str) -> bool:
        """Cancel a request if it belongs to a beam search. Return whether it does.

        The search ends when its last request is cancelled.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        group.open_ids.discard(request_id)
        if not group.open_ids:
            self._end(group)
        return True

    def on_failed(self, failed: RequestFailed) -> list[RequestFailed]:
        """Return a failure for each request that fails as a result of `failed`.

        If a beam has failed, its search ends, and all requests of the search fail. Any other
        failure is returned unchanged.
        """
        group = self._by_member.get(failed.request_id)
        if group is None:
            return [failed]
        self._end(group)
        return [
            RequestFailed(request_id=request.request_id, message=failed.message)
            for request in group.requests
        ]

    def _advance(self, group: _BeamGroup) -> list[TokenOutput]:
        group.advance()
        if group.state.is_over:
            self._end(group)
            return group.outputs()

        parents = group.members
        beams = group.state.beams
        extended_parents = {parents[beam.parent] for beam in beams}
        # First cancel beams without extensions, so that their memory is free for the others.
        self._cancel_members([parent for parent in parents if parent not in extended_parents])

        children = [group.beam(place, beam.token_ids) for place, beam in enumerate(beams)]
        for beam, child in zip(beams, children, strict=True):
            self._scheduler.fork(parents[beam.parent], child)
        self._cancel_members(sorted(extended_parents))
        self._add_members(group, [child.request_id for child in children])
        return group.progress() if group.num_steps == _PROVEN_STEPS else []

    def _add_members(self, group: _BeamGroup, members: list[str]) -> None:
        group.members = members
        self._by_member |= dict.fromkeys(members, group)

    def _cancel_members(self, members: list[str]) -> None:
        for member in members:
            del self._by_member[member]
            self._scheduler.cancel(member)

    def _end(self, group: _BeamGroup) -> None:
        self._cancel_members(group.members)
        for request in group.requests:
            del self._groups[request.request_id]


def _new_group(requests: list[EngineRequest]) -> _BeamGroup:
    first = requests[0]
    assert first.beam is not None, "a search without its width"
    rules = BeamRules(
        width=first.beam.width,
        length_penalty=first.beam.length_penalty,
        stop_token_ids=frozenset(first.stop_token_ids),
        max_tokens=first.max_tokens,
    )
    return _BeamGroup(requests, rules, open_ids={request.request_id for request in requests})
