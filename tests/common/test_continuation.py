"""What is kept of an answer, and when a request is given up."""

import grpc
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.continuation import Losses, Progress
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import validate_request

LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "the connection broke")
BROKEN = ServiceError(grpc.StatusCode.INTERNAL, "WORKER_LOST", "workers died of it")


def begun(**fields: object) -> tuple[pb.GenerateRequest, Progress]:
    request = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=9), **fields)
    progress = Progress(request)
    progress.on_accepted(pb.Accepted(seed=5, max_tokens=7, degraded=["top_p=0.7"]), 9)
    return request, progress


def delta(*token_ids: int, text: str = "", sample: int = 0) -> pb.Delta:
    return pb.Delta(
        token_ids=token_ids, text=text, num_tokens=max(1, len(token_ids)), sample=sample
    )


def test_a_continuation_has_all_that_came_and_what_was_granted() -> None:
    request, progress = begun(samples=pb.Samples(n=2))
    progress.on_delta(delta(1, 2, text="é"))
    progress.on_delta(delta(3, text="\N{GRINNING FACE}"))
    progress.on_delta(delta(8, text="b", sample=1))
    progress.on_sample_finished(pb.SampleFinished(sample=1, reason=pb.FINISH_REASON_STOP))
    progress.write(request)
    one, two = request.continuation.answers
    assert (list(one.token_ids), one.text_length, one.reason) == ([1, 2, 3], 2, 0)
    assert (list(two.token_ids), two.reason) == ([8], pb.FINISH_REASON_STOP)
    assert (request.sampling.seed, request.stop.max_tokens) == (5, 7)
    assert list(request.continuation.degraded) == ["top_p=0.7"]
    again = Progress(request)
    assert (again.num_tokens, again.longest, again.max_tokens) == (4, 3, 7)
    again.on_delta(delta(4))
    again.write(request)
    assert list(request.continuation.answers[0].token_ids) == [1, 2, 3, 4]


def accepted(fingerprint: str, progress: Progress) -> None:
    tokens = progress.num_tokens
    progress.on_accepted(pb.Accepted(fingerprint=fingerprint, continued_tokens=tokens), 7)


def test_tokens_of_engines_that_compute_otherwise_make_an_answer_inexact() -> None:
    request = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=9))
    progress = Progress(request)
    accepted("a", progress)
    progress.on_delta(delta(1))
    accepted("a", progress)
    assert not progress.goes_on_inexactly
    progress.on_delta(delta(2))
    assert not progress.is_inexact
    assert progress.fingerprints == ("a",)
    accepted("b", progress)  # and is lost before it sends anything
    assert progress.goes_on_inexactly
    accepted("a", progress)
    progress.on_delta(delta(3))
    assert not progress.is_inexact
    assert not progress.goes_on_inexactly
    accepted("b", progress)
    progress.on_delta(delta(4))
    assert progress.is_inexact
    progress.write(request)
    assert list(request.continuation.fingerprints) == ["a", "b"]
    again = Progress(request)
    accepted("b", again)
    assert again.is_inexact
    assert again.goes_on_inexactly


def test_more_fingerprints_than_an_answer_can_have_are_refused() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1]), stop=pb.StopConditions(max_tokens=9)
    )
    request.continuation.answers.add(token_ids=[2])
    request.continuation.fingerprints.extend(f"{number:064}" for number in range(32))
    validate_request(request)
    request.continuation.fingerprints.append("one more")
    with pytest.raises(ServiceError, match=r"continuation\.fingerprints.* 33.*at most 32"):
        validate_request(request)
    request.continuation.fingerprints[:] = ["x" * 65]
    with pytest.raises(ServiceError, match=r"65 bytes.*at most 64 bytes"):
        validate_request(request)


def test_an_answer_without_a_token_is_exact_wherever_it_goes() -> None:
    progress = Progress(pb.GenerateRequest(stop=pb.StopConditions(max_tokens=9)))
    accepted("a", progress)
    accepted("b", progress)
    progress.on_delta(delta(1))
    assert not progress.is_inexact


def test_an_answer_that_begins_anew_is_exact() -> None:
    request = pb.GenerateRequest(samples=pb.Samples(n=1, best_of=2))
    progress = Progress(request)
    progress.on_accepted(pb.Accepted(fingerprint="a"), 7)
    progress.on_delta(delta(1, 2))
    progress.on_loss()
    progress.on_accepted(pb.Accepted(fingerprint="b"), 7)
    progress.on_delta(delta(1, 2))
    assert not progress.is_inexact


def test_a_continuation_from_an_unknown_engine_is_inexact_where_the_next_is_known() -> None:
    request, progress = begun()
    progress.on_delta(delta(1))
    progress.write(request)
    del request.continuation.fingerprints[:]  # as a client of an earlier release sends it
    for fingerprint, is_inexact in (("a", True), ("", False)):
        again = Progress(request)
        accepted(fingerprint, again)
        again.on_delta(delta(2))
        assert again.is_inexact == is_inexact


def test_what_has_no_token_yet_begins_anew() -> None:
    request, progress = begun()
    progress.write(request)
    assert not request.HasField("continuation")
    assert (request.sampling.seed, request.stop.max_tokens) == (5, 7)


def test_tokens_without_ids_cannot_be_gone_on_with() -> None:
    _, progress = begun()
    progress.on_delta(delta(1))
    assert progress.is_whole
    progress.on_delta(delta(text="from an older engine"))
    assert not progress.is_whole


def test_what_is_known_only_at_the_end_begins_anew() -> None:
    request, progress = begun(samples=pb.Samples(n=1, best_of=2))
    progress.on_delta(delta(1, 2))
    assert progress.is_whole
    progress.on_loss()
    progress.write(request)
    assert not request.HasField("continuation")
    assert (request.sampling.seed, progress.num_tokens) == (5, 0)


def test_a_server_that_would_begin_anew_is_refused() -> None:
    _, progress = begun()
    progress.on_delta(delta(1))
    progress.on_accepted(pb.Accepted(continued_tokens=1), 7)
    with pytest.raises(ServiceError, match="cannot continue"):
        progress.on_accepted(pb.Accepted(), 7)


@pytest.mark.parametrize(
    ("errors", "tokens", "allowed"),
    [
        ([LOST] * 9, [0], 2),
        ([BROKEN] * 9, [1], 1),
        ([LOST] * 40, [1], 15),
        ([LOST, BROKEN] * 9, [1], 3),
        ([LOST] * 9, [1, 1, 0], 3),
    ],
    ids=["it never grows", "engines say so", "it grows", "some say so", "it grows no more"],
)
def test_a_request_may_lose_only_so_many_engines(
    errors: list[ServiceError], tokens: list[int], allowed: int
) -> None:
    """`tokens` come before each loss; the last number of them before all that follow."""
    _, progress = begun()
    losses = Losses()
    num_survived = 0
    for number, error in enumerate(errors):
        if tokens[min(number, len(tokens) - 1)]:
            progress.on_delta(delta(number))
        losses.add(error, progress)
        if losses.are_too_many:
            break
        num_survived += 1
    assert num_survived == allowed


def test_a_request_is_suspect_before_it_is_given_up() -> None:
    _, progress = begun()
    losses = Losses()
    seen = []
    for _ in range(3):
        losses.add(LOST, progress)
        seen.append((losses.is_suspect, losses.are_too_many))
    assert seen == [(False, False), (True, False), (True, True)]
