"""The pages on the metrics port, for Prometheus and for the operator.

/metrics         metrics in Prometheus' text format
/stats           the router's state, as JSON
/measures        a JSON list with one object, which maps each pool to its `PoolReport`
/measures/wait   the same, but sent once a pool with zero replicas is needed, or after `WAIT_S`
/console         the console, if enabled (`console/console.py`)

/measures is a list because a router of version 0.1.0 could have several processes, each of which
contributed one item. During an upgrade, an operator reads reports from routers of both versions.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from ullage_common.process.metrics import exposition
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status, internal, method_not_allowed
from ullage_router.http.messages import Endpoint, Reply, Request, Routes
from ullage_router.http.openai.errors import envelope, error_headers
from ullage_router.server.load_report import LoadReporter

WAIT_S = 10.0
"""Maximum number of seconds that /measures/wait waits before it replies."""
ANSWER_TIMEOUT_S = 2.0
"""Seconds that open requests on the metrics port have to finish when the router stops."""
JSON = "application/json"

log = logging.getLogger(__name__)

Page = Callable[[], Awaitable[tuple[str, bytes]]]
"""A function that returns the content type and the body of a page."""


class Pages:
    """Serves the pages on the metrics port. Unknown paths get the same response as /metrics.

    Args:
        pages: The pages by path.
        stats: Takes the `authorization` header, and returns the body of /stats or raises
            ServiceError.
        routes: Routes of the console, or None if the console is off.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        stats: Callable[[str | None], bytes],
        routes: Routes | None = None,
    ) -> None:
        self._pages = pages
        self._stats = stats
        self._routes = routes or {}

    async def __call__(self, request: Request, reply: Reply) -> None:
        try:
            if error := request.refusal:
                raise error
            if methods := self._routes.get(request.path):
                await _endpoint(request, methods)(request, reply)
                return
            kind, body = await self._page(request)
        except Exception as failure:
            if reply.has_begun:
                raise
            error = failure if isinstance(failure, ServiceError) else internal()
            if error is not failure:
                log.exception("page failed", extra={"path": request.path})
            # The traceback holds the request, which may hold the error: a reference cycle.
            error.with_traceback(None)
            headers = [(b"content-type", JSON.encode()), *error_headers(error)]
            await reply.whole(http_status(error), headers, envelope(error))
            return

        await reply.whole(HTTPStatus.OK, [(b"content-type", kind.encode())], body)

    async def _page(self, request: Request) -> tuple[str, bytes]:
        if request.path == "/stats":
            return JSON, self._stats(request.headers.get("authorization"))
        return await self._pages.get(request.path, self._pages["/metrics"])()


def _endpoint(request: Request, methods: Mapping[str, Endpoint]) -> Endpoint:
    if endpoint := methods.get(request.method):
        return endpoint
    raise method_not_allowed(request.path, ", ".join(methods))


def make_pages(registry: CollectorRegistry, measures: LoadReporter) -> dict[str, Page]:
    """Return the pages that require no API key, by path."""

    async def metrics() -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, exposition(registry)

    async def report() -> tuple[str, bytes]:
        return JSON, msgspec.json.encode([measures.report()])

    async def wait() -> tuple[str, bytes]:
        await measures.wait_until_wanted(WAIT_S)
        return await report()

    return {"/metrics": metrics, "/measures": report, "/measures/wait": wait}
