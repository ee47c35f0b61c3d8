"""The metrics of all processes of a router, from whichever of them is asked.

Every process answers on a Unix socket of its own with its own metrics. Asked over the network, a
process asks all of them and puts their answers together; each sample says in the label `process`
whose it is, so that sums are Prometheus' to make and gauges keep their meaning.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ullage_router.http.messages import Reply, Request
from ullage_router.http.server import HTTPServer
from ullage_rpc.errors import ServiceError

ANSWER_TIMEOUT_S = 2.0
_HEAD_END = b"\r\n\r\n"
_ASK = b"GET /metrics HTTP/1.0\r\n\r\n"


class Siblings:
    """The processes that share this one's ports.

    Args:
        registry: of this process.
        folder: where each has its socket.
        index: of this process.
        count: of all.
    """

    def __init__(self, registry: CollectorRegistry, folder: Path, index: int, count: int) -> None:
        self._registry = registry
        self._folder = folder
        self._index = index
        self._count = count
        self._own = HTTPServer(_Page(lambda: generate_latest(registry)))
        self._shared: HTTPServer | None = None

    async def start(self, metrics_listener: socket.socket) -> None:
        """Answers the others from now on, and the network on the port of the metrics."""
        path = _path(self._folder, self._index)
        path.unlink(missing_ok=True)  # of a process that died in this place
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        await self._own.start(listener)
        self._shared = HTTPServer(_GatheredPage(self))
        await self._shared.start(metrics_listener)

    async def stop(self) -> None:
        if self._shared:
            await self._shared.stop(ANSWER_TIMEOUT_S)
        await self._own.stop(ANSWER_TIMEOUT_S)

    def describe(self) -> dict[str, object]:
        """Whose state it is that /stats tells."""
        return {"process": self._index, "processes": self._count}

    async def metrics(self) -> bytes:
        """Of all processes that answer."""
        others = [i for i in range(self._count) if i != self._index]
        told = await asyncio.gather(*(_ask(_path(self._folder, i)) for i in others))
        texts = {self._index: generate_latest(self._registry).decode()}
        texts |= {i: text for i, text in zip(others, told, strict=True) if text is not None}
        return merged(texts).encode()


def merged(texts: Mapping[int, str]) -> str:
    """Prometheus' text of several processes as one, each sample with the label `process`."""
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


class _Page:
    """Answers everything with metrics."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make

    async def serve(self, request: Request, reply: Reply) -> None:
        _tell(reply, self._make())

    def check(self, request: Request) -> None:
        """Whatever is sent along is not looked at."""

    def refuse(self, request: Request, reply: Reply, error: ServiceError) -> None:
        reply.whole(HTTPStatus.BAD_REQUEST, [], error.message.encode())


class _GatheredPage(_Page):
    def __init__(self, siblings: Siblings) -> None:
        super().__init__(bytes)
        self._siblings = siblings

    async def serve(self, request: Request, reply: Reply) -> None:
        _tell(reply, await self._siblings.metrics())


def _tell(reply: Reply, body: bytes) -> None:
    reply.whole(HTTPStatus.OK, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)


async def _ask(path: Path) -> str | None:
    """None when that process does not answer: it is starting, or gone."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(_ASK)
                answer = await reader.read(-1)
            finally:
                writer.close()
            head, _, body = answer.partition(_HEAD_END)
            return body.decode() if b" 200 " in head else None
    return None


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
