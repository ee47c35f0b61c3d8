"""Wrong HTTP/2 frames, and wrong messages in right ones, to a real router's gRPC port."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.background_loop import background_loop
from ullage_testing.byte_fuzz import Mutator, check_rounds, exchanged, new_seeds
from ullage_testing.grpc_client_process import grpc_client_process
from ullage_testing.http2_frames import PREFACE, FrameMutator, conversation, without_grpc_errors

from ullage.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    StartService = Any

SERVICE = "/ullage.inference.v1.InferenceService"
CALL = pb.ToolCall(id="c", name="f", arguments='{"a": [1]}')
REQUESTS = {
    "Generate": [
        pb.GenerateRequest(text="Hi", stop=pb.StopConditions(max_tokens=3)),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), request_id="r", session_id="s"),
        pb.GenerateRequest(
            messages=pb.Messages(
                messages=[
                    pb.Message(role="user", content="Hi"),
                    pb.Message(role="assistant", tool_calls=[CALL]),
                    pb.Message(role="tool", content="2", tool_call_id="c"),
                ],
                template_arguments='{"a": 1}',
            ),
            sampling=pb.SamplingParams(temperature=0.5, logit_bias={5: 1.0}),
            samples=pb.Samples(n=2),
            grammar=pb.Grammar(regex="a+"),
        ),
    ],
    "Pick": [pb.PickRequest()],
    "GetModel": [pb.GetModelRequest(model="tiny")],
}
WORDS = (
    b"\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xff\xfe",
    b"\x0a\x00" * 500,
    b"\x0b" * 500,
    b"\xe2\x80",
    b"grpc-encoding",
    b"\x3f\xe1\xff\x03",
    b"\x80\x80",
    b"a" * 20_000,
    (1 << 31).to_bytes(4),
)
COUNT = 150
"""Connections, and as many messages, of a round."""
LEAKED_BYTES = 450 * COUNT
"""What grpcio 1.85 loses in a round: about 410 bytes a connection (docs/reasons/lessons.md)."""
SLOW_S = 360.0
HONEST = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
"""Statuses that a message may get: what HTTP calls less than 500, or 503."""


def test_wrong_frames(start_service: "StartService", caplog: pytest.LogCaptureFixture) -> None:
    codes = fuzz(start_service, caplog, range(3))
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes.keys()


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_many_wrong_frames(start_service: "StartService", caplog: pytest.LogCaptureFixture) -> None:
    fuzz(start_service, caplog, new_seeds(SLOW_S))


def fuzz(
    start_service: "StartService", caplog: pytest.LogCaptureFixture, seeds: Iterable[int]
) -> Counter[grpc.StatusCode]:
    """Send frames and messages, and return how many messages got each status."""
    codes = Counter[grpc.StatusCode]()
    bodies = [(name, each.SerializeToString()) for name in REQUESTS for each in REQUESTS[name]]
    frames = conversation(f"{SERVICE}/Generate", bodies[0][1])
    right = PREFACE + b"".join(frame.encoded() for frame in frames)
    with contextlib.ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.ERROR))
        stack.enter_context(without_grpc_errors())
        loop = stack.enter_context(background_loop())
        service = loop.enter(start_service())
        port = service.router.grpc_port
        (engine,) = service.engines
        statuses_of = stack.enter_context(grpc_client_process(port))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        health = health_pb2_grpc.HealthStub(channel)

        def wrong_message(mutator: Mutator) -> tuple[str, bytes]:
            name, body = mutator.rng.choice(bodies)
            return f"{SERVICE}/{name}", mutator.changed(body)

        def send_round(seed: int) -> None:
            mutator = Mutator([right], WORDS, seed)
            wrong = FrameMutator(frames, mutator).connections(COUNT)
            for _ in exchanged(port, wrong, mutator.rng):
                pass

            messages = [wrong_message(mutator) for _ in range(COUNT)]
            statuses = statuses_of(messages)
            codes.update(statuses)
            for message, status in zip(messages, statuses, strict=True):
                assert status in HONEST, (status, message)

            answer = health.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

            engine.forget_requests()
            logged = [record.getMessage() for record in caplog.records]
            assert not logged, seed
            caplog.clear()

        # gRPC leaves exceptions that refer to themselves.
        check_rounds(loop, seeds, send_round, leaves_garbage=True, leaked_bytes=LEAKED_BYTES)
    return codes
