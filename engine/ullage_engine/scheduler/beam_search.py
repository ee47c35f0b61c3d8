"""Beam search, as a pure function from the likeliest next tokens to the next beams.

The algorithm is that of `transformers.generate(num_beams=width, do_sample=False,
early_stopping=False)`. Each step considers every extension of every beam by one token. If one of
the `width` likeliest extensions ends with a stop token, it becomes a finished hypothesis. The
`width` finished hypotheses with the best scores are kept. The `width` likeliest extensions that do
not end become the next beams. The score of a hypothesis is

    sum of its tokens' log-probabilities / (number of its tokens ^ length penalty)

The search ends once `width` hypotheses are finished and the likeliest beam, scored as if it ended
now, does not beat the worst of them. The search also ends at the length limit, where all extensions
end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage_engine.protocol.requests import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The settings of one beam search: its width, how it scores hypotheses and when it ends."""

    width: int
    length_penalty: float
    stop_token_ids: frozenset[int]
    max_tokens: int
    """Maximum length of a hypothesis in tokens."""

    @property
    def num_candidates(self) -> int:
        """Return the number of next tokens that every beam must report.

        A step needs the `width` likeliest extensions overall, and the `width` likeliest that do not
        end with a stop token. Within a beam, at most the stop tokens and `width` - 1 other tokens
        can be likelier than a token that the step needs.
        """
        return self.width + len(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible next token with its log-probability."""

    token_id: int
    report: TokenLogprobs
    """Log-probabilities of the token and its alternatives, to report to the client."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished hypothesis that the search may extend."""

    tokens: tuple[Candidate, ...] = ()
    logprob: float = 0.0
    """Sum of the log-probabilities of the beam's tokens."""
    parent: int = 0
    """Index of the previous step's beam that this beam extends."""

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished hypothesis, including the stop token that ended it."""

    tokens: tuple[Candidate, ...]
    score: float
    finish: Literal["stop", "length"]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a beam search between two steps. A new search has one empty beam."""

    beams: tuple[Beam, ...] = (Beam(),)
    """Unfinished beams, likeliest first. Empty once the search is over."""
    finished: tuple[Hypothesis, ...] = ()
    """At most `width` finished hypotheses, best first."""

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
    """Advance an unfinished search by one step.

    Args:
        search: the state before the step.
        candidates: for each beam, its `rules.num_candidates` likeliest next tokens, likeliest
            first. If a beam has fewer possible next tokens, all of them are listed.
        rules: the search's parameters.
        is_last: whether this step must be the last because the engine's length limit has been
            reached.

    Returns:
        The state after the step.
    """
    extensions = _extensions(search.beams, candidates)
    is_last = is_last or extensions[0].length >= rules.max_tokens
    ended = [each for each in extensions[: rules.width] if is_last or each.ends(rules)]
    hypotheses = [*search.finished, *(each.as_hypothesis(rules) for each in ended)]
    finished = sorted(hypotheses, key=lambda each: -each.score)[: rules.width]

    alive = [] if is_last else [each for each in extensions if not each.ends(rules)]
    if alive and not _may_improve(alive[0], finished, rules):
        alive = []
    return Search(tuple(each.as_beam() for each in alive[: rules.width]), tuple(finished))


class _Extension(NamedTuple):
    """A beam extended by one more token."""

    logprob: float
    parent: int
    beam: Beam
    token: Candidate

    @property
    def length(self) -> int:
        return len(self.beam.tokens) + 1

    def score(self, rules: BeamRules) -> float:
        """Return the score that the extension would have as a finished hypothesis."""
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
    """List all extensions of all beams, likeliest first. Ties keep the order of the beams."""
    extended = [
        _Extension(beam.logprob + token.report.logprob, parent, beam, token)
        for parent, (beam, some) in enumerate(zip(beams, candidates, strict=True))
        for token in some
    ]
    return sorted(extended, key=lambda each: -each.logprob)


def _may_improve(best: _Extension, finished: Sequence[Hypothesis], rules: BeamRules) -> bool:
    """Return whether the best extension, if it ended now, would be among the hypotheses to keep."""
    return len(finished) < rules.width or best.score(rules) > finished[-1].score
