"""Another service's router as a step, asked over gRPC as any client asks it."""

import contextlib
import time
from collections.abc import AsyncIterator

import grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_router import errors
from ullage_router.answer import Answer, Call, Event, EventStream, read, timed_out
from ullage_router.stats import Record
from ullage_rpc.channels import open_channel
from ullage_rpc.errors import ServiceError

PATH_KEY = "x-ullage-cascade"
"""Metadata that names the cascades a request came through, joined by commas."""


class Peer:
    """The router of another service.

    Args:
        target: its `host:port`, gRPC.
        name: what the cascade that asks calls itself.
    """

    def __init__(self, target: str, name: str) -> None:
        self._name = name
        self._channel = open_channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def begin(self, call: Call) -> Answer:
        """Its answer, once it has a first token.

        Raises:
            ServiceError: it refused or failed.
        """
        proof = [("authorization", call.authorization)] if call.authorization else []
        path = ",".join((*call.path, self._name))
        stream = self._stub.Generate(
            _for_peer(call),
            timeout=max(0.001, call.remaining_s),
            metadata=(*call.metadata, *proof, (PATH_KEY, path)),
        )
        try:
            first = await read(stream)
            if first is None:
                raise errors.broken_stream("the service ended it before its first token")
        except BaseException:
            stream.cancel()
            raise
        _note(call.record, first.accepted)
        return _PeerAnswer(stream, call, first.accepted)


class _PeerAnswer:
    """An answer that another router began."""

    def __init__(
        self,
        stream: EventStream,
        call: Call,
        accepted: inference_pb2.Accepted,
    ) -> None:
        self.accepted = accepted
        self._stream = stream
        self._call = call

    async def events(self) -> AsyncIterator[Event]:
        record = self._call.record
        while (event := await self._next()) is not None:
            record.output_tokens += event.delta.num_tokens
            if event.HasField("finished"):
                record.output_tokens = event.finished.usage.completion_tokens
                yield event
                await self._end()
                return
            yield event
        raise errors.broken_stream("the service ended it without a last word")

    def close(self) -> None:
        self._stream.cancel()

    async def _end(self) -> None:
        """Waits until the service has counted the request, for which a cancelled one has failed."""
        with contextlib.suppress(ServiceError):
            await read(self._stream)

    async def _next(self) -> Event | None:
        try:
            return await read(self._stream)
        except ServiceError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return timed_out(self.accepted.prompt_tokens, self._call.record.output_tokens)


def _for_peer(call: Call) -> inference_pb2.GenerateRequest:
    """The request without the name of our model, which is none of theirs."""
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(call.request)
    request.model, request.request_id = "", call.record.request_id
    return request


def _note(record: Record, accepted: inference_pb2.Accepted) -> None:
    record.ttft_s = time.monotonic() - record.arrived
    record.prompt_tokens = accepted.prompt_tokens
    record.predicted_bytes = accepted.predicted_bytes
    record.action, record.route, record.reason = accepted.action, accepted.route, "CASCADE"
    record.engine, record.model = accepted.engine, accepted.model
    record.degraded = list(accepted.degraded)
