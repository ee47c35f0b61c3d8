"""Beam search, one step at a time, as a pure function of each beam's likeliest next tokens.

The search is the one of `transformers.generate(num_beams=width, do_sample=False,
early_stopping=False)`. In a step every beam is extended by every token. Of the `width` likeliest
extensions those that end are finished hypotheses, ranked by score and kept up to `width`; of the
extensions that do not end the `width` likeliest go on. The score of a hypothesis is

    sum of its tokens' log-probabilities / (number of its tokens ^ length penalty)

The search is over when `width` hypotheses are finished and the likeliest beam, scored as if it
ended now, is no better than the worst of them; or at the length limit, where all extensions end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage_engine.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What stays the same over one search."""

    width: int
    length_penalty: float
    stop_token_ids: frozenset[int]
    max_tokens: int
    """Longest hypothesis, tokens."""

    @property
    def num_candidates(self) -> int:
        """Next tokens that must be known of every beam.

        A step looks at `width` extensions, and at `width` that do not end: whichever beam they come
        from, they are among its `width` likeliest beside those that end it.
        """
        return self.width + len(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next."""

    token_id: int
    report: TokenLogprobs
    """Its log-probability, and the alternatives to it that a client may be told."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that may go on."""

    tokens: tuple[Candidate, ...] = ()
    logprob: float = 0.0
    """Sum over its tokens."""
    parent: int = 0
    """Its place among the beams of the step before, without its last token."""

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended; a stop token that ended it is its last."""

    tokens: tuple[Candidate, ...]
    score: float
    finish: Literal["stop", "length"]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Search:
    """State between two steps; a new search has one empty beam."""

    beams: tuple[Beam, ...] = (Beam(),)
    """Likeliest first; none when the search is over."""
    finished: tuple[Hypothesis, ...] = ()
    """Best first, at most `width`."""

    @property
    def is_over(self) -> bool:
        return not self.beams


def advance(
    search: Search,
    candidates: Sequence[Sequence[Candidate]],
    rules: BeamRules,
    *,
    is_last: bool = False,
) -> Search:
    """One step of a search that is not over.

    Args:
        candidates: for each beam its `rules.num_candidates` likeliest next tokens, or all there
            are, likeliest first.
        is_last: the limit on the length is reached although `max_tokens` is not.
    """
    extensions = _extensions(search.beams, candidates)
    is_last = is_last or extensions[0].length >= rules.max_tokens
    ended = [each for each in extensions[: rules.width] if is_last or each.ends(rules)]
    found = [*search.finished, *(each.as_hypothesis(rules) for each in ended)]
    finished = sorted(found, key=lambda each: -each.score)[: rules.width]
    alive = [] if is_last else [each for each in extensions if not each.ends(rules)]
    if alive and not _may_improve(alive[0], finished, rules):
        alive = []
    return Search(tuple(each.as_beam() for each in alive[: rules.width]), tuple(finished))


class _Extension(NamedTuple):
    """A beam and one token more."""

    logprob: float
    parent: int
    beam: Beam
    token: Candidate

    @property
    def length(self) -> int:
        return len(self.beam.tokens) + 1

    def score(self, rules: BeamRules) -> float:
        """As if it ended now."""
        return float(self.logprob / self.length**rules.length_penalty)

    def ends(self, rules: BeamRules) -> bool:
        return self.token.token_id in rules.stop_token_ids

    def as_beam(self) -> Beam:
        return Beam((*self.beam.tokens, self.token), self.logprob, self.parent)

    def as_hypothesis(self, rules: BeamRules) -> Hypothesis:
        finish: Literal["stop", "length"] = "stop" if self.ends(rules) else "length"
        return Hypothesis((*self.beam.tokens, self.token), self.score(rules), finish)


def _extensions(
    beams: Sequence[Beam], candidates: Sequence[Sequence[Candidate]]
) -> list[_Extension]:
    """Every beam with every candidate, likeliest first; ties by beam, then by candidate."""
    extended = [
        _Extension(beam.logprob + token.report.logprob, parent, beam, token)
        for parent, (beam, some) in enumerate(zip(beams, candidates, strict=True))
        for token in some
    ]
    return sorted(extended, key=lambda each: -each.logprob)


def _may_improve(best: _Extension, finished: Sequence[Hypothesis], rules: BeamRules) -> bool:
    """Whether going on could better the worst hypothesis, judged at the present length."""
    return len(finished) < rules.width or best.score(rules) > finished[-1].score
