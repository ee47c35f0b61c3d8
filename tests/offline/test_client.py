"""Requests to a router on a real socket that refuses, fails, breaks off and goes away."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.errors import ServiceError, to_status
from ullage_offline.client import MAX_FAULTS, Asked, RequestError, ServiceLost, ask_all
from ullage_offline.outputs import RequestOutput

Response = inference_pb2.GenerateResponse
Request = inference_pb2.GenerateRequest
Finished = inference_pb2.Finished
STOP = inference_pb2.FINISH_REASON_STOP
TIMEOUT = inference_pb2.FINISH_REASON_TIMEOUT


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """A router whose answers a function makes."""

    def __init__(self) -> None:
        self.respond: Callable[[Request, int], Iterator[Response]] = lambda request, number: whole(
            request
        )
        self.target = ""
        self.count = 0
        self.running = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def Generate(self, request: Request, context: Any) -> Iterator[Response]:
        with self._lock:
            self.count += 1
            number = self.count
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        try:
            yield from self.respond(request, number)
        except ServiceError as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        finally:
            with self._lock:
                self.running -= 1


def whole(request: Request) -> Iterator[Response]:
    yield accepted(request)
    yield Response(delta=inference_pb2.Delta(text=request.text.upper(), token_ids=[1]))
    yield Response(finished=inference_pb2.Finished(reason=STOP))


def accepted(request: Request) -> Response:
    ids = [len(request.text)]
    return Response(
        accepted=inference_pb2.Accepted(request_id=request.request_id, prompt_token_ids=ids)
    )


def refusal(code: grpc.StatusCode, retry_after_s: float | None = None) -> ServiceError:
    return ServiceError(code, "SOME_REASON", "a message", retry_after_s=retry_after_s)


@pytest.fixture
def router() -> Iterator[Router]:
    servicer = Router()
    threads = ThreadPoolExecutor(32)
    server = grpc.server(threads)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()
    threads.shutdown()


def ask(
    router: Router, count: int, concurrency: int = 4, failure: Callable[[], str] = lambda: ""
) -> dict[int, RequestOutput]:
    asked: list[Asked] = [(Request(text=f"p{i}", request_id=str(i)), f"p{i}") for i in range(count)]
    return dict(ask_all(router.target, asked, concurrency, failure))


def check_whole(answers: dict[int, RequestOutput], count: int) -> None:
    assert sorted(answers) == list(range(count))
    for index, answer in answers.items():
        assert answer.request_id == str(index)
        assert answer.prompt == f"p{index}"
        assert [output.text for output in answer.outputs] == [f"P{index}"]


def test_all_are_answered_a_few_at_a_time(router: Router) -> None:
    check_whole(ask(router, 50, concurrency=3), 50)
    assert router.most_at_once <= 3
    assert ask(router, 0) == {}


def test_refusals_wait_as_long_as_they_say(router: Router) -> None:
    def respond(request: Request, number: int) -> Iterator[Response]:
        if number <= 20:
            raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01)
        yield from whole(request)

    router.respond = respond
    check_whole(ask(router, 8), 8)
    assert router.count == 28


def test_an_answer_that_broke_off_is_asked_for_again(
    router: Router, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_offline.client.PAUSE_S", 0.01)
    reasons = {
        "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
        "timeout": inference_pb2.FINISH_REASON_TIMEOUT,
    }
    ends: dict[str, Callable[[], Iterator[Response]]] = {
        name: lambda reason=reason: iter(  # type: ignore[misc]
            [Response(finished=inference_pb2.Finished(reason=reason))]
        )
        for name, reason in reasons.items()
    }
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):

        def fail(code: grpc.StatusCode = code) -> Iterator[Response]:
            raise refusal(code)
            yield

        ends[code.name] = fail

    for name, end in ends.items():
        router.count = 0

        def respond(
            request: Request, number: int, end: Callable[[], Iterator[Response]] = end
        ) -> Iterator[Response]:
            if number > 2:
                yield from whole(request)
                return
            yield accepted(request)
            yield Response(delta=inference_pb2.Delta(text="half of"))
            yield from end()

        router.respond = respond
        with subtests.test(name):
            check_whole(ask(router, 2), 2)
            assert router.count == 4


def test_a_request_that_can_never_be_answered_ends_the_others(router: Router) -> None:
    def respond(request: Request, number: int) -> Iterator[Response]:
        if request.text == "p5":
            raise refusal(grpc.StatusCode.INVALID_ARGUMENT)
        yield from whole(request)

    router.respond = respond
    with pytest.raises(RequestError, match="a message") as raised:
        ask(router, 1000, concurrency=2)
    assert raised.value.index == 5
    assert raised.value.is_invalid
    assert router.count < 1000


def test_faults_end_a_request_after_some_tries(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_offline.client.PAUSE_S", 0.01)

    def respond(request: Request, number: int) -> Iterator[Response]:
        raise refusal(grpc.StatusCode.INTERNAL)
        yield

    router.respond = respond
    with pytest.raises(RequestError) as raised:
        ask(router, 1)
    assert not raised.value.is_invalid
    assert router.count == MAX_FAULTS


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (Finished(reason=TIMEOUT), r"limits\.requestTimeout"),
        (Finished(reason=TIMEOUT, stop_string="ENGINE_LOST"), "ENGINE_LOST"),
        (Finished(reason=inference_pb2.FINISH_REASON_CANCELLED), "the service cancelled it"),
    ],
)
def test_answers_that_are_always_cut_off_end_a_request(
    router: Router,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: inference_pb2.Finished,
    message: str,
) -> None:
    monkeypatch.setattr("ullage_offline.client.PAUSE_S", 0.01)

    def respond(request: Request, number: int) -> Iterator[Response]:
        yield accepted(request)
        yield Response(delta=inference_pb2.Delta(text="half of", token_ids=[1]))
        yield Response(finished=end)

    router.respond = respond
    with pytest.raises(RequestError, match=f"cut off {MAX_FAULTS} times in a row: .*{message}"):
        ask(router, 1)
    assert router.count == MAX_FAULTS
    assert len(caplog.records) == MAX_FAULTS - 1
    assert "request 0 is sent again" in caplog.text


def test_a_refusal_between_two_faults_ends_their_row(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_offline.client.PAUSE_S", 0.01)

    def respond(request: Request, number: int) -> Iterator[Response]:
        if number > 3 * MAX_FAULTS:
            yield from whole(request)
        elif number % 3 == 0:
            raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01)
        else:
            yield accepted(request)
            yield Response(finished=Finished(reason=TIMEOUT))

    router.respond = respond
    check_whole(ask(router, 1), 1)


def test_a_refusal_without_a_time_ends_a_request(router: Router) -> None:
    def respond(request: Request, number: int) -> Iterator[Response]:
        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)
        yield

    router.respond = respond
    with pytest.raises(RequestError):
        ask(router, 1)
    assert router.count == 1


def test_the_end_of_the_service_ends_all(router: Router) -> None:
    def respond(request: Request, number: int) -> Iterator[Response]:
        raise refusal(grpc.StatusCode.UNAVAILABLE, 30.0)
        yield

    router.respond = respond
    with pytest.raises(ServiceLost, match="no memory"):
        ask(router, 8, failure=lambda: "no memory")


def test_an_interrupt_cancels_running_requests(router: Router) -> None:
    def respond(request: Request, number: int) -> Iterator[Response]:
        yield from whole(request) if number == 1 else endless(request)

    router.respond = respond
    asked: list[Asked] = [(Request(text=f"p{i}"), None) for i in range(8)]
    answers = ask_all(router.target, asked, 4, lambda: "")
    next(answers)
    answers.close()
    assert router.count < 8


def endless(request: Request) -> Iterator[Response]:
    """Send tokens until the client is gone, which closes this generator."""
    yield accepted(request)
    pause = threading.Event()
    while True:
        yield Response(delta=inference_pb2.Delta(text="and "))
        pause.wait(0.01)
