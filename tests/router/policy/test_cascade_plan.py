"""Where a request starts and what it takes to be let go: tables of pure functions."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CascadeSection
from ullage_router.policy.cascade import (
    Confidence,
    Features,
    ServiceLoad,
    features,
    has_code,
    has_maths,
    plan,
)
from ullage_router.policy.decision import Attempt, attempts_header

Request = inference_pb2.GenerateRequest
SMALL = {"name": "small", "target": "small-router:9000"}
MIDDLE = {"name": "middle", "target": "middle-router:9000"}
OWN = {"name": "big"}


def policy(*steps: dict[str, str], **more: Any) -> CascadeSection:
    document = {"name": "default/big", "steps": list(steps) or [SMALL, MIDDLE, OWN], **more}
    return msgspec.convert(document, CascadeSection)


@pytest.mark.parametrize(
    ("given", "steps", "reason"),
    [
        (Features(), (0, 1, 2), "FIRST"),
        (Features(characters=6001), (1, 2), "HARD"),
        (Features(turns=11), (1, 2), "HARD"),
        (Features(has_code=True, has_maths=True), (2,), "HARD"),
        (Features(has_code=True, has_maths=True, has_tools=True, turns=99), (2,), "HARD"),
        (Features(has_several_answers=True), (2,), "SEVERAL_ANSWERS"),
        (Features(is_bound=True), (2,), "OWN_TOKENS"),
    ],
)
def test_where_a_request_starts(given: Features, steps: tuple[int, ...], reason: str) -> None:
    chosen = plan(given, ServiceLoad(), policy())
    assert (chosen.steps, chosen.reason) == (steps, reason)
    assert chosen.is_judged == (len(steps) > 1)


def test_heuristics_can_be_turned_off() -> None:
    off = {"prompt_characters": 0, "turns": 0, "code": False, "maths": False, "tools": False}
    hard = Features(9999, 99, has_code=True, has_maths=True, has_tools=True)
    assert plan(hard, ServiceLoad(), policy(heuristics=off)).steps == (0, 1, 2)


def test_the_own_engines_may_be_the_first_step() -> None:
    """A request in this model's tokens goes nowhere else, wherever in the list that is."""
    small_here = policy({"name": "here"}, {"name": "big", "target": "big-router:9000"})
    assert plan(Features(is_bound=True), ServiceLoad(), small_here).steps == (0,)
    assert plan(Features(), ServiceLoad(), small_here).steps == (0, 1)


@pytest.mark.parametrize(
    ("priority", "load", "is_peak"),
    [
        (-1, ServiceLoad(pressure_level=1), True),
        (-1, ServiceLoad(queued=8), True),
        (-100, ServiceLoad(pressure_level=3, queued=99), True),
        (0, ServiceLoad(pressure_level=3, queued=99), False),
        (-1, ServiceLoad(queued=7), False),
        (-1, ServiceLoad(), False),
    ],
)
def test_low_priorities_make_room_at_the_peak(
    priority: int, load: ServiceLoad, is_peak: bool
) -> None:
    chosen = plan(Features(priority=priority, has_code=True), load, policy(fallback={}))
    assert (chosen.reason == "PEAK") == is_peak
    if is_peak:
        assert chosen.steps == (0, 1, 2)
        assert not chosen.is_judged


def test_signs_of_a_peak_can_be_turned_off() -> None:
    off = policy(fallback={"pressure_level": 0, "queued_requests": 0})
    assert plan(Features(priority=-100), ServiceLoad(9, 999), off).reason == "FIRST"
    assert plan(Features(priority=-100), ServiceLoad(9, 999), policy()).reason == "FIRST"


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        ("What does this do?\n```python\nprint(1)\n```", True),
        ("def f(x):\n    return x\n\ndef g(x):\n    pass", True),
        ('int main() {\n  puts("x");\n}', True),
        ("SELECT a FROM t\nWHERE b\nSELECT c FROM d", True),
        ("Let me know what the class of 1984 did.\nImport taxes rose; why?", False),
        ("Dear Ann,\nthank you;\nyours", False),
        ("Function and form: which follows which?\nfrom here to there", False),
    ],
)
def test_what_reads_like_code(text: str, is_code: bool) -> None:
    assert has_code(text) == is_code


@pytest.mark.parametrize(
    ("text", "is_maths"),
    [
        ("What is 12 * (34 + 56) / 78?", True),
        ("Solve x^2 = 4", True),
        (r"Evaluate \frac{a}{b} for all b", True),
        ("Who won the election of 1848 in France, and why?", False),
        ("Room 12, floor 3", False),
        ("Tell me a story about a well-known dog - a good one", False),
    ],
)
def test_what_reads_like_maths(text: str, is_maths: bool) -> None:
    assert has_maths(text) == is_maths


@given(st.text(alphabet=" \t\n;{}abc=`$\\^1", max_size=3000))
def test_any_text_can_be_read(text: str) -> None:
    has_code(text * 4), has_maths(text * 4)


def test_traits_of_requests() -> None:
    turns = [inference_pb2.Message(role="user", content="x" * 30_000) for _ in range(3)]
    found = features(Request(messages=inference_pb2.Messages(messages=turns), priority=-7))
    assert (found.characters, found.turns, found.priority) == (90_000, 3, -7)
    assert not found.is_bound
    assert features(Request(token_ids=inference_pb2.TokenIds(ids=[1]))).is_bound
    stop = inference_pb2.StopConditions(stop_token_ids=[1])
    assert features(Request(text="x", stop=stop)).is_bound
    biased = inference_pb2.SamplingParams(logit_bias={7: 1.0})
    assert features(Request(text="x", sampling=biased)).is_bound
    equipped = inference_pb2.Messages(messages=turns, tools=inference_pb2.Tools(functions="[]"))
    assert features(Request(messages=equipped)).has_tools
    assert not found.has_tools
    assert features(Request(text="x", samples=inference_pb2.Samples(n=2))).has_several_answers
    beam = inference_pb2.Samples(beam=inference_pb2.BeamSearch(width=1))
    assert features(Request(text="x", samples=beam)).has_several_answers
    middle = f"{'a ' * 9000}```{' a' * 9000}"
    assert not features(Request(text=middle)).has_code, "only the ends are searched"


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=40), st.integers(1, 50))
def test_confidence_is_the_geometric_mean_of_the_first(values: list[float], wanted: int) -> None:
    confidence = Confidence(wanted)
    for value in values:
        confidence.add(1, [value])
    first = values[:wanted]
    expected = math.prod(math.exp(v) for v in first) ** (1 / len(first))
    assert confidence.value == pytest.approx(expected, rel=1e-6)
    assert confidence.is_complete == (len(values) >= wanted)
    assert confidence.reaches(0.0)


def test_unknown_confidence_reaches_nothing() -> None:
    confidence = Confidence(2)
    assert confidence.value is None
    assert not confidence.reaches(0.0)
    confidence.add(2, [])
    assert confidence.is_complete
    assert not confidence.reaches(0.0), "tokens without log-probabilities"
    confidence.add(1, [float("nan")])
    assert not confidence.reaches(0.0)
    impossible = Confidence(1)
    impossible.add(1, [-math.inf])
    assert impossible.value == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": [OWN]}, "length >= 2"),
        ({"steps": [SMALL, MIDDLE]}, "exactly one"),
        ({"steps": [OWN, {"name": "other"}]}, "exactly one"),
        ({"steps": [SMALL, {"name": "small"}]}, "share a name"),
        ({"steps": [OWN, SMALL], "fallback": {}}, "put another before it"),
        ({"confidence": {"threshold_percent": 150}}, "<= 1"),
        ({"confidence": {"tokens": 0}}, ">= 1"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        policy(**({"steps": [SMALL, OWN]} | change))


def test_the_header_tells_every_attempt() -> None:
    tried = [Attempt("small", "escalated", confidence=0.4123), Attempt("big", "served")]
    assert attempts_header(tried) == "small=escalated;confidence=0.412, big=served"
    thrown = Attempt("small", "escalated", completion_tokens=9)
    assert (
        thrown.discarded_tokens,
        Attempt("a", "served", completion_tokens=9).discarded_tokens,
    ) == (9, 0)
