"""The connection to one engine: a gRPC channel with one stream that carries all requests.

A connection can be replaced while it streams answers, for example when certificates change. The new
channel replaces the old one immediately, but new requests use the old stream until the new stream
is open. Answers on the old stream get a grace period in which to finish.
"""

import asyncio
from collections.abc import Callable

import grpc

from ullage.headroom.v1 import headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.tls import speaks_tls
from ullage_router.engines.flow_control import FlowControl, Source
from ullage_router.engines.multiplex import Metadata, Multiplexer


class EngineConnection:
    """The channel to one engine, and its Multiplex stream.

    Args:
        address: `ip:port` of the engine.
        dial: opens a channel to an address. The second argument selects plaintext.
        on_stream_change: called when the stream has been opened or lost.
        on_replaced: called when a new channel or stream has replaced the current one.
    """

    def __init__(
        self,
        address: str,
        dial: Callable[[str, bool], grpc.aio.Channel],
        on_stream_change: Callable[[], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self._address = address
        self._dial = dial
        self._on_stream_change = on_stream_change
        self._on_replaced = on_replaced
        self._is_plaintext = False
        """Whether the engine turned out to use plaintext, if both plaintext and TLS are allowed."""
        self._previous: Multiplexer | None = None
        """The previous channel's stream, kept until the current channel's stream is open."""
        self._retiring: dict[asyncio.Task[None], tuple[grpc.aio.Channel, Multiplexer]] = {}
        """Old channels with their streams, by the tasks that close them."""
        self._open_channel()

    def _open_channel(self) -> None:
        self._channel = self._dial(self._address, self._is_plaintext)
        self.headroom_stub = headroom_pb2_grpc.HeadroomServiceStub(self._channel)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._multiplexer = Multiplexer(self.stub, self._address, self._on_stream_change)

    @property
    def is_open(self) -> bool:
        """Whether new requests can be sent on either the current or the previous stream."""
        previous = self._previous
        return self._multiplexer.is_open or (previous is not None and previous.is_open)

    @property
    def is_stream_open(self) -> bool:
        """Whether the current channel's stream is open."""
        return self._multiplexer.is_open

    @property
    def lacks_stream(self) -> bool:
        """Whether the engine cannot receive requests because it does not implement Multiplex."""
        return self._multiplexer.is_missing and not self.is_open

    async def open_stream(self) -> None:
        """Wait until the stream is open or the engine turns out not to implement Multiplex."""
        await self._multiplexer.open()

    def call(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata,
        flow: FlowControl,
    ) -> Source | None:
        """Send a request and return its stream of responses, or None if no stream is open."""
        if self._multiplexer.is_open:
            return self._multiplexer.call(request, timeout_s, metadata, flow)
        if self._previous and self._previous.is_open:
            return self._previous.call(request, timeout_s, metadata, flow)
        return None

    async def match_transport(self, starts_stream: bool) -> None:
        """Replace the channel if the engine uses TLS and the channel does not, or vice versa.

        Args:
            starts_stream: whether to open the new channel's stream immediately, as in `replace`.
        """
        is_secure = await speaks_tls(self._address)
        if is_secure is None or is_secure is not self._is_plaintext:
            return
        self._is_plaintext = not is_secure
        self.replace(0, starts_stream)

    def replace(self, grace_s: float, starts_stream: bool) -> None:
        """Replace the channel, but let answers on the old channel finish within a grace period.

        Args:
            grace_s: seconds that answers on the old channel have to finish.
            starts_stream: whether to open the new channel's stream immediately. Otherwise, the
                stream is opened once the engine has described its model.
        """
        channel = self._channel
        previous = self._multiplexer
        self._open_channel()
        if previous.is_open:
            self._previous = previous
        if starts_stream:
            self._multiplexer.start()
        self._on_replaced()

        retiring = asyncio.create_task(self._retire(channel, previous, grace_s))
        self._retiring[retiring] = channel, previous
        retiring.add_done_callback(self._retiring.pop)

    async def _retire(
        self, channel: grpc.aio.Channel, previous: Multiplexer, grace_s: float
    ) -> None:
        """Close an old channel once its answers have finished, or after `grace_s` at the latest."""
        if previous.is_open:
            await self._multiplexer.open()
        previous.retire()
        if self._previous is previous:
            self._previous = None
            self._on_replaced()
        await previous.wait_for_end(grace_s)
        await _close(channel, previous)

    async def close(self) -> None:
        """Close the current channel and all old channels, which ends their answers."""
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)

        for channel, multiplexer in (*retiring.values(), (self._channel, self._multiplexer)):
            await _close(channel, multiplexer)


async def _close(channel: grpc.aio.Channel, multiplexer: Multiplexer) -> None:
    await multiplexer.close()
    await channel.close()
