"""A tenant's later request with the same idempotency key ends the earlier one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from ullage_router.answer import Call
from ullage_router.errors import REPLACED
from ullage_rpc.errors import ServiceError, invalid

MAX_KEY_CHARACTERS = 256
HEADER = "idempotency-key"


class Replacer:
    """Who holds which key; this router's, one entry a request in flight at most.

    Args:
        enabled: whether keys mean anything.

    replaced
        requests that a later one ended
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._holders: dict[tuple[str, str], _Holder] = {}
        self.replaced = 0

    def hold(self, call: Call) -> contextlib.AbstractAsyncContextManager[None] | None:
        """None for a call without a key; otherwise, while the block runs, a later call with the
        same key ends it, as this one ends an earlier.

        Raises, from the block:
            ServiceError: it was replaced, or its key is too long.
        """
        task = asyncio.current_task() if self._enabled and call.idempotency_key else None
        return self._hold(call, task) if task else None

    @contextlib.asynccontextmanager
    async def _hold(self, call: Call, task: asyncio.Task[object]) -> AsyncIterator[None]:
        name = (call.record.tenant, _checked(call.idempotency_key))
        mine = _Holder(task)
        older = self._take(name, mine)
        try:
            if older:
                await older.leave()
            yield
        except asyncio.CancelledError as error:
            if mine.is_cause_of_end():
                raise _replaced(call) from error
            raise
        finally:
            mine.left.set()
            if self._holders.get(name) is mine:
                del self._holders[name]

    def _take(self, name: tuple[str, str], mine: "_Holder") -> "_Holder | None":
        older = self._holders.get(name)
        self._holders[name] = mine
        self.replaced += older is not None
        return older


class _Holder:
    """A task that holds a key; ended as `asyncio.timeout` ends one."""

    # What the older one holds of a quota is the newer's, which so waits for it to leave.
    LEAVE_S = 1.0

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._cancelling = task.cancelling()
        self._is_ended = False
        self.left = asyncio.Event()

    async def leave(self) -> None:
        self._is_ended = True
        self._task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.LEAVE_S):
                await self.left.wait()

    def is_cause_of_end(self) -> bool:
        """False when somebody else cancelled the task, too: that one's word counts."""
        return self._is_ended and self._task.uncancel() <= self._cancelling


def _checked(key: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        message = f"{HEADER} has {len(key)} characters; send at most {MAX_KEY_CHARACTERS}"
        raise invalid(HEADER, message)
    return key


def _replaced(call: Call) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.ABORTED,
        REPLACED,
        f"a later request with the {HEADER} {call.idempotency_key!r} replaced this one",
    )
