"""The pages on the metrics port, for Prometheus and for the operator.

/metrics         metrics of all processes of this router, in Prometheus' text format
/stats           the state of the answering process, as JSON
/measures        a list with each process's `PoolReport`s by pool, as JSON
/measures/wait   the same list, once a pool at zero replicas is needed, or after `WAIT_S`
/console         the console, if enabled (`console/console.py`)

Every process serves its own metrics on a Unix socket. A process that gets a request over the
network collects the answers of all others and merges them. The label `process` of each sample names
its process, so that Prometheus can add counters up and gauges keep their meaning.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from ullage_common.process.metrics import exposition
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status, internal, method_not_allowed
from ullage_router.http.messages import Endpoint, Reply, Request, Routes
from ullage_router.http.openai.errors import envelope, error_headers
from ullage_router.http.server import HTTPServer
from ullage_router.server.load_report import LoadReporter

WAIT_S = 10.0
"""Seconds after which /measures/wait answers in any case."""
ANSWER_TIMEOUT_S = 2.0
"""Seconds within which another process must answer."""
ASK_AGAIN_S = 0.5
"""Seconds between two looks at the reports of all processes."""
JSON = "application/json"
_HEAD_END = b"\r\n\r\n"

log = logging.getLogger(__name__)

Page = Callable[[], Awaitable[tuple[str, bytes]]]
"""Returns the content type and the body."""


class Pages:
    """Answer every request with one of the pages; an unknown path gets /metrics.

    Args:
        pages: The pages by path.
        stats: Returns the body of /stats for a header `authorization`, or raises ServiceError.
        routes: Routes of the console; None: the console is off.
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


def own_pages(registry: CollectorRegistry, measures: LoadReporter) -> dict[str, Page]:
    """Return the pages of this process."""

    async def metrics() -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, exposition(registry)

    async def report() -> tuple[str, bytes]:
        return JSON, msgspec.json.encode([measures.report()])

    async def wait() -> tuple[str, bytes]:
        await measures.wait_until_wanted(WAIT_S)
        return await report()

    return {"/metrics": metrics, "/measures": report, "/measures/wait": wait}


class Siblings:
    """The processes that share the ports of this process.

    Args:
        pages: The pages of this process.
        stats: The body of this process's /stats; see `Pages`.
        folder: The folder of the processes' Unix sockets.
        index: The index of this process.
        count: The number of processes.
        routes: Routes of the console for the network.
        own_routes: Routes of the console for the other processes.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        stats: Callable[[str | None], bytes],
        folder: Path,
        index: int,
        count: int,
        routes: Routes | None = None,
        own_routes: Routes | None = None,
    ) -> None:
        self._pages = pages
        self._folder = folder
        self._index = index
        self._count = count
        self._own = HTTPServer(Pages(pages, stats, own_routes))
        self.pages = Pages(
            {
                "/metrics": self._metrics,
                "/measures": self._measures,
                "/measures/wait": self._wait,
            },
            stats,
            routes,
        )
        """The merged pages of all processes."""
        self._shared: HTTPServer | None = None

    async def start(self, metrics_listener: socket.socket, shared: HTTPServer) -> None:
        """Start to serve the other processes, and the network on the metrics port.

        Args:
            metrics_listener: The socket of the metrics port.
            shared: The server of `pages`.
        """
        self._shared = shared
        path = socket_path(self._folder, self._index)
        path.unlink(missing_ok=True)  # left by a process with this index that died
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        await self._own.start(listener)
        await shared.start(metrics_listener)

    async def stop(self) -> None:
        """Stop serving the network and the other processes."""
        if self._shared:
            await self._shared.stop(ANSWER_TIMEOUT_S)
        await self._own.stop(ANSWER_TIMEOUT_S)

    async def _metrics(self) -> tuple[str, bytes]:
        texts = {i: text.decode() for i, text in (await self._all("/metrics")).items()}
        return CONTENT_TYPE_LATEST, merged(texts).encode()

    async def _measures(self) -> tuple[str, bytes]:
        """Return the reports of all processes that answer."""
        documents = (await self._all("/measures")).values()
        reports = [report for text in documents for report in msgspec.json.decode(text)]
        return JSON, msgspec.json.encode(reports)

    async def _wait(self) -> tuple[str, bytes]:
        """Return the reports once any process reports that a pool is wanted, or after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while True:
            kind, body = await self._measures()
            reports = msgspec.json.decode(body)
            is_needed = any(pool["wanted"] for report in reports for pool in report.values())
            if is_needed or time.monotonic() >= end:
                return kind, body
            await asyncio.sleep(ASK_AGAIN_S)

    async def _all(self, page: str) -> dict[int, bytes]:
        """Return the page of each process that answers, by index."""
        others = [i for i in range(self._count) if i != self._index]
        answers = await asyncio.gather(*(_ask(socket_path(self._folder, i), page) for i in others))
        _, own = await self._pages[page]()
        by_index = {i: text for i, text in zip(others, answers, strict=True) if text is not None}
        return {self._index: own, **by_index}


def merged(texts: Mapping[int, str]) -> str:
    """Merge the Prometheus texts of several processes; each sample gets the label `process`.

    Args:
        texts: The texts by index of the process.
    """
    families: dict[str, list[str]] = {}
    for index in sorted(texts):
        family: list[str] = []
        for line in texts[index].splitlines():
            if line.startswith("# HELP "):
                is_new = line not in families
                family = families.setdefault(line, [])
            elif line.startswith("#"):
                if is_new:
                    family.append(line)
            elif line:
                family.append(_labelled(line, index))

    lines = [line for head, family in families.items() for line in (head, *family)]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, index: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{process="{index}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{process="{index}"}} {value}'


async def _ask(path: Path, page: str) -> bytes | None:
    """Return the page of another process; None if it does not answer, as while it starts."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(f"GET {page} HTTP/1.0\r\n\r\n".encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
            head, _, body = answer.partition(_HEAD_END)
            return body if b" 200 " in head else None
    return None


def socket_path(folder: Path, index: int) -> Path:
    """Return the path of a process's Unix socket."""
    return folder / f"{index}.sock"
