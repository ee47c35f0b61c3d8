"""The pages on the port of the metrics: for Prometheus and for the operator.

/metrics         Prometheus' text
/measures        a list with each process's `PoolReport`s by pool, as JSON
/measures/wait   the same, once a pool that sleeps is wanted, or after `WAIT_S`
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ullage_router.http.messages import Reply, Request
from ullage_router.measures import Measures
from ullage_rpc.errors import ServiceError

WAIT_S = 10.0
JSON = "application/json"

Page = Callable[[], Awaitable[tuple[str, bytes]]]
"""Makes a body and says its type."""


class Pages:
    """Answers every request with one of the pages; /metrics for what is none."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages

    async def serve(self, request: Request, reply: Reply) -> None:
        kind, body = await self._pages.get(request.path, self._pages["/metrics"])()
        reply.whole(HTTPStatus.OK, [(b"content-type", kind.encode())], body)

    def check(self, request: Request) -> None:
        """Whatever is sent along is not looked at."""

    def refuse(self, request: Request, reply: Reply, error: ServiceError) -> None:
        reply.whole(HTTPStatus.BAD_REQUEST, [], error.message.encode())


def own_pages(registry: CollectorRegistry, measures: Measures) -> dict[str, Page]:
    """Of this process."""

    async def metrics() -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, generate_latest(registry)

    async def report() -> tuple[str, bytes]:
        return JSON, msgspec.json.encode([measures.report()])

    async def wait() -> tuple[str, bytes]:
        await measures.wanted(WAIT_S)
        return await report()

    return {"/metrics": metrics, "/measures": report, "/measures/wait": wait}
