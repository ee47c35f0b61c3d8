"""Ends a tenant's request when a later request has the same `x-ullage-replace` key.

This is the opposite of `Idempotency-Key`, where the later request gets the earlier request's answer
(`pipeline/idempotency.py`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_router.call import Call, Event, Handler, ResponseStream
from ullage_router.errors import REPLACED

MAX_KEY_CHARACTERS = 256
HEADER = "x-ullage-replace"
MAX_WAIT_S = 1.0
"""Maximum seconds that a later request waits for the earlier one to release its quota."""


class Replacer:
    """Tracks running requests that a later request with the same key may replace.

    replaced
        number of requests that were replaced by later requests
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], _Holder] = {}
        self.replaced = 0

    async def replace_earlier(self, call: Call, proceed: Handler) -> ResponseStream:
        """End any earlier call with the same key, then run this call, which may be replaced too.

        Raises:
            ServiceError: a later call replaced this call, or the key is too long.
        """
        if not call.replace_key:
            return await proceed(call)
        name = (call.tenant.name, checked_key(HEADER, call.replace_key))
        earlier = self._holders.get(name)
        holder = _Holder(call.replace_key)
        self._holders[name] = holder
        self.replaced += earlier is not None

        try:
            with holder.cancellable():
                if earlier:
                    call.end_turn()
                    await earlier.end()
                holder.stream = await proceed(call)
        except BaseException:
            self._remove(name, holder)
            raise

        return _ReplaceableStream(holder.stream, holder, lambda: self._remove(name, holder))

    def _remove(self, name: tuple[str, str], holder: "_Holder") -> None:
        holder.has_ended.set()
        if self._holders.get(name) is holder:
            del self._holders[name]


class _Holder:
    """The request that currently holds a replacement key, and the task that serves it."""

    def __init__(self, key: str) -> None:
        task = asyncio.current_task()
        assert task
        self.stream: ResponseStream | None = None
        self.has_ended = asyncio.Event()
        self._key = key
        self._task = task
        self._cancelling = task.cancelling()
        self._is_replaced = False
        self._is_waiting = False

    async def end(self) -> None:
        """Cancel the request, and wait up to `MAX_WAIT_S` seconds for it to end.

        The engine stops generating immediately. The request also ends immediately if its task is
        waiting for the answer. Otherwise, for example while a slow client is reading, the request
        ends the next time its task reads from the answer.
        """
        self._is_replaced = True
        if self._is_waiting:
            self._task.cancel()
        elif self.stream:
            self.stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S):
                await self.has_ended.wait()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Let `end` cancel the request's task while it awaits the answer in the `with` block.

        Raises:
            ServiceError: a later request replaced this request.
        """
        if self._is_replaced:
            raise self._error()
        self._is_waiting = True
        try:
            yield
        except asyncio.CancelledError as error:
            # If the client has disconnected as well, its cancellation counts.
            if self._is_replaced and self._task.uncancel() <= self._cancelling:
                raise self._error() from error
            raise
        finally:
            self._is_waiting = False

    def _error(self) -> ServiceError:
        return ServiceError(
            grpc.StatusCode.ABORTED,
            REPLACED,
            f"a later request with the {HEADER} {self._key!r} replaced this one",
        )


class _ReplaceableStream:
    """The answer to a request that a later request with the same key may replace."""

    def __init__(
        self, stream: ResponseStream, holder: _Holder, on_close: Callable[[], None]
    ) -> None:
        self.accepted: inference_pb2.Accepted = stream.accepted
        self._stream = stream
        self._holder = holder
        self._on_close = on_close

    @property
    def output_tokens(self) -> int:
        return self._stream.output_tokens

    async def events(self) -> AsyncIterator[Event]:
        events = self._stream.events()
        while True:
            with self._holder.cancellable():
                event = await anext(events, None)
            if event is None:
                return
            yield event

    def close(self) -> None:
        self._stream.close()
        self._on_close()


def checked_key(header: str, key: str) -> str:
    """Return the key if it is not too long. Otherwise, raise an error that names the header."""
    if len(key) > MAX_KEY_CHARACTERS:
        message = f"{header} has {len(key)} characters; send at most {MAX_KEY_CHARACTERS}"
        raise invalid(header, message)
    return key
