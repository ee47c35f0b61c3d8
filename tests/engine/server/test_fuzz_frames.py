"""Wrong HTTP/2 frames to an engine's gRPC port, which goes on serving."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.background_loop import background_loop
from ullage_testing.byte_fuzz import Mutator, check_rounds, exchanged, new_seeds
from ullage_testing.http2_frames import (
    PREFACE,
    Frame,
    FrameMutator,
    conversation,
    without_grpc_errors,
)

from ullage.inference.v1 import inference_pb2 as pb

Serve = Callable[..., AbstractAsyncContextManager[Any]]
GENERATE = "/ullage.inference.v1.InferenceService/Generate"
MULTIPLEX = "/ullage.inference.v1.InferenceService/Multiplex"
REQUEST = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=pb.StopConditions(max_tokens=3)
)
JOINED = pb.MultiplexRequest(calls=[pb.MultiplexCall(tag=1, request=REQUEST, window=5)])
WORDS = (b"\0", b"\xff" * 9 + b"\x01", b"\xff\xfe", b"\x0b" * 500, b"\xe2\x80")
COUNT = 80
"""Connections of a round."""


def test_wrong_frames(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(serve, caplog, range(3))


@pytest.mark.slow
def test_many_wrong_frames(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(serve, caplog, new_seeds(60.0))


def later(frame: Frame) -> Frame:
    """Return a frame of a stream that none of the first conversation is."""
    return replace(frame, stream=frame.stream and frame.stream + 8)


def fuzz(serve: Serve, caplog: pytest.LogCaptureFixture, seeds: Iterable[int]) -> None:
    frames = [
        *conversation(GENERATE, REQUEST.SerializeToString())[:-1],
        *(later(each) for each in conversation(MULTIPLEX, JOINED.SerializeToString())[2:]),
    ]
    right = PREFACE + b"".join(frame.encoded() for frame in frames)
    with background_loop() as loop, caplog.at_level(logging.ERROR), without_grpc_errors():
        port = loop.enter(serve()).port

        def send_round(seed: int) -> None:
            mutator = Mutator([right], WORDS, seed)
            wrong = FrameMutator(frames, mutator).connections(COUNT)
            for _ in exchanged(port, wrong, mutator.rng):
                pass
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = health.Check(health_pb2.HealthCheckRequest(service="readiness"))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            logged = [record.getMessage() for record in caplog.records]
            assert not logged, seed
            caplog.clear()

        check_rounds(loop, seeds, send_round, leaves_garbage=True)
