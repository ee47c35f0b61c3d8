"""Reading a request's body within bounds, and noticing that the client has gone."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine

import grpc
from starlette.datastructures import Headers
from starlette.types import Receive

from ullage_rpc.errors import ServiceError

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0
# A connection closed on a client that still sends may lose the answer on its way; so what follows a
# refused body is read and thrown away for a moment.
LINGER_S = 2.0


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """The whole body.

    Raises:
        ServiceError: it is longer than MAX_BODY_BYTES, and no more than that has been read, or did
            not arrive within BODY_TIMEOUT_S.
        ClientGone: the client went before it was complete.
    """
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared)} bytes")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive)
    except TimeoutError as error:
        raise ServiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE",
            f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s; send it at once",
        ) from error


async def _read(receive: Receive) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY_BYTES:
            raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(chunks)


async def discard(receive: Receive) -> None:
    """Throws away what the client still sends, for LINGER_S at most."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while time.monotonic() < until and (await receive()).get("more_body", False):
                pass


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Does the work, but drops it at once when the client goes."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(size: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BODY_TOO_LARGE",
        f"the body has {size}; send at most {MAX_BODY_BYTES}",
        metadata={"field": "body"},
    )
