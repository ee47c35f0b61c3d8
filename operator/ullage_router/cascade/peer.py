"""Runs a step of a cascade by sending the request to another service's router.

To the other router, the cascade is an ordinary gRPC client. It connects in plaintext or over TLS,
and authenticates with the client's key or with this service's key.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.router import StepSection
from ullage_common.process.api_keys import HASH_PREFIX, read_entry
from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import fingerprint, follow
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error, invalid
from ullage_common.wire.request_fields import (
    client_names,
    later_fields,
    set_fields,
    unknown_fields,
)
from ullage_common.wire.tls import Certificates
from ullage_router import errors
from ullage_router.call import Call, Event, ResponseStream, timed_out

PATH_KEY = "x-ullage-cascade"
"""Metadata key for the comma-separated names of the cascades that forwarded the request."""
DESCRIBED_FOR_S = 60.0
"""How long the fields that another service announces are taken as known, in seconds."""
DESCRIBE_TIMEOUT_S = 5.0
EventStream = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Event]

log = logging.getLogger(__name__)


class PeerKey:
    """This service's API key for another service, reloaded when its mounted Secret changes.

    Args:
        folder: The folder that contains the file `key`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def authorization(self) -> str:
        """The value to send in the `authorization` header."""
        return f"Bearer {self._key}"

    async def start(self) -> None:
        """Read the key and watch it for changes.

        Raises:
            ConfigError: The file is missing or contains no valid key.
        """
        seen = fingerprint([self._folder])
        self._read()
        failure = "key not read; the previous key stays in use"
        self._task = asyncio.create_task(follow([self._folder], seen, self._reload, failure))

    async def close(self) -> None:
        """Stop watching the key."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _read(self) -> None:
        path = self._folder / "key"
        try:
            key = path.read_text(encoding="ascii").strip()
            read_entry(key)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; the Secret must have the entry key"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None

        if key.startswith(HASH_PREFIX):
            raise ConfigError(f"{path}: contains the digest of a key; write the key itself")
        self._key = key

    async def _reload(self) -> None:
        self._read()


class PeerRouter:
    """Sends requests to another service's router.

    Args:
        step: The router's address, and the folders of the certificates and the key.
        name: The name of the cascade that sends the requests.
        grace_s: Seconds that running answers have to finish when the certificate changes.
    """

    def __init__(self, step: StepSection, name: str, grace_s: float) -> None:
        self._step = step
        self._name = name
        self._grace_s = grace_s
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._key = PeerKey(Path(step.key_dir)) if step.key_dir else None
        self._unknown_fields: frozenset[str] = frozenset()
        """Paths of the request fields that the other service does not know."""
        self._described_until = 0.0
        """Time on the monotonic clock at which the other service must describe itself again."""
        self.certificates: Certificates | None = None
        if step.tls:
            folder = Path(step.tls.dir)
            self.certificates = Certificates(folder, folder, self._reconnect)

    async def start(self) -> None:
        """Read the certificates and the key.

        Raises:
            ConfigError: The certificates or the key cannot be used.
        """
        if self.certificates:
            await self.certificates.start()
        if self._key:
            await self._key.start()

    async def close(self) -> None:
        """Close the channels, and stop watching the certificates and the key."""
        if self.certificates:
            await self.certificates.close()
        if self._key:
            await self._key.close()
        if self._channel:
            await self._channel.close()

        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _reconnect(self) -> None:
        """Close the channel, so that the next request opens a new one with the new certificate."""
        if self._channel:
            task = asyncio.create_task(self._channel.close(self._grace_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._channel = None

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            tls = self._step.tls
            target = self._step.target
            if tls and self.certificates:
                credentials = self.certificates.channel_credentials()
                self._channel = open_channel(target, credentials, tls.server_name)
            else:
                self._channel = open_channel(target)
        return self._channel

    async def ask(self, call: Call) -> ResponseStream:
        """Send the request, and return its answer once the other service has accepted the request.

        Args:
            call: The copy of the request for this step.

        Raises:
            ServiceError: The other service refused or failed.
        """
        call.end_turn()

        authorization = self._key.authorization if self._key else call.authorization
        credentials = [("authorization", authorization)] if authorization else []
        path = ",".join((*call.path, self._name))

        stub = inference_pb2_grpc.InferenceServiceStub(self._connected())
        request = _for_peer(call)
        if later := set_fields(request, later_fields()):
            await self._check_fields(stub, later, credentials)
        stream = stub.Generate(
            request,
            timeout=max(0.001, call.deadline.remaining_s),
            metadata=(*call.metadata, *credentials, (PATH_KEY, path)),
        )

        try:
            first = await _read(stream)
            if first is None:
                raise errors.broken_stream("the service ended the stream before the first token")
        except BaseException:
            stream.cancel()
            raise

        accepted = first.accepted
        call.decisions.change(
            prompt_tokens=accepted.prompt_tokens,
            predicted_bytes=accepted.predicted_bytes,
            action=accepted.action,
            route=accepted.route,
            reason="CASCADE",
            engine=accepted.engine,
            model=accepted.model,
            degraded=tuple(accepted.degraded),
        )
        return _PeerStream(stream, accepted)

    async def _check_fields(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        needed: frozenset[str],
        credentials: Sequence[tuple[str, str]],
    ) -> None:
        """Check that the other service knows all fields of a request.

        Args:
            stub: The stub of the other service's router.
            needed: Paths of the fields that not every version knows.
            credentials: The metadata with the key.

        Raises:
            ServiceError: The other service is too old for a field, or does not describe itself.
        """
        now = time.monotonic()
        if now >= self._described_until:
            try:
                described = await stub.GetModel(
                    inference_pb2.GetModelRequest(),
                    timeout=DESCRIBE_TIMEOUT_S,
                    metadata=tuple(credentials),
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._unknown_fields = unknown_fields(described.request_fields)
            self._described_until = now + DESCRIBED_FOR_S
        if lacking := needed & self._unknown_fields:
            names = client_names(lacking)
            raise invalid(
                names.partition(",")[0],
                f"the service of the step {self._step.name} is older and does not know {names}; "
                "leave it out, or upgrade that service",
                "FIELD_NOT_SUPPORTED",
            )


class _PeerStream:
    """The event stream of a request that another service's router has accepted."""

    def __init__(self, stream: EventStream, accepted: inference_pb2.Accepted) -> None:
        self.accepted = accepted
        self.output_tokens = 0
        self._stream = stream

    async def events(self) -> AsyncIterator[Event]:
        """Yield the other router's events, followed by a timeout event if the deadline passes."""
        while (event := await self._next()) is not None:
            self.output_tokens += event.delta.num_tokens
            if event.HasField("finished"):
                self.output_tokens = event.finished.usage.completion_tokens
                yield event
                await self._end()
                return
            yield event
        raise errors.broken_stream("the service ended the stream without a final event")

    def close(self) -> None:
        """Cancel the request at the other router."""
        self._stream.cancel()

    async def _end(self) -> None:
        """Wait for the RPC to finish, so that the other service counts the request as served.

        If the RPC were cancelled early, the other service would count it as a failure.
        """
        with contextlib.suppress(ServiceError):
            await _read(self._stream)

    async def _next(self) -> Event | None:
        try:
            return await _read(self._stream)
        except ServiceError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return timed_out(self.accepted, self.output_tokens)


def _for_peer(call: Call) -> inference_pb2.GenerateRequest:
    """Return the request to send to the other service, without a model name or a high priority.

    This service's model name means nothing to the other service. A high priority would let the
    request overtake the other service's own clients, or get it refused if its tenant may not use
    that priority. A low priority is kept, because low-priority work should yield everywhere.
    """
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(call.request)
    request.model = ""
    request.request_id = call.record.request_id
    request.priority = min(0, call.request.priority)
    return request


async def _read(stream: EventStream) -> Event | None:
    """Return the stream's next message, or None at the end of the stream.

    Raises:
        ServiceError: The RPC failed.
    """
    try:
        event = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return event if isinstance(event, Event) else None
