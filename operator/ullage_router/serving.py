"""One request's stay in the router, as the block that has its answer."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from ullage_router import errors
from ullage_router.answer import Answer, Begin, Call
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

Hold = AbstractAsyncContextManager[None]


class Serving:
    """Begins an answer, and closes it and says what became of the request when the block is left.

    Written out, since every request passes here and a generator for it takes several times longer.

    Args:
        call: the request.
        begin: starts its answer.
        hold: around everything, where one is wanted.
        on_end: called once everything is over and the record says how.
    """

    def __init__(
        self, call: Call, begin: Begin, hold: Hold | None, on_end: Callable[[Call], None]
    ) -> None:
        self._call = call
        self._begin = begin
        self._hold = hold
        self._on_end = on_end
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        try:
            hold, self._hold = self._hold, None
            if hold:
                await hold.__aenter__()
                self._hold = hold  # entered, so it must be left
            answer = self._answer = await self._begin(self._call)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return answer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._answer:
                self._answer.close()
            if self._hold:
                await self._hold.__aexit__(kind, error, traceback)
        except BaseException as other:
            error = other
            raise
        finally:
            _tell(self._call.record, error)
            self._on_end(self._call)


def _tell(record: Record, error: BaseException | None) -> None:
    """What the client is told."""
    if error is None:
        record.status = 200
    elif isinstance(error, ServiceError):
        record.status, record.error = errors.http_status(error), error.reason
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        record.status, record.error = errors.CLIENT_CLOSED, "CANCELLED"
    else:
        record.status, record.error = 500, "INTERNAL"
