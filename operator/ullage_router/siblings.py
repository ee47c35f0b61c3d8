"""The metrics of all processes of a router, from whichever of them is asked.

Every process answers on a Unix socket of its own with its own metrics. Asked over the network, a
process asks all of them and puts their answers together; each sample says in the label `process`
whose it is, so that sums are Prometheus' to make and gauges keep their meaning.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from ullage_router.http.server import HTTPServer
from ullage_router.monitoring import JSON, WAIT_S, Page, Pages

ANSWER_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.5
_HEAD_END = b"\r\n\r\n"


class Siblings:
    """The processes that share this one's ports.

    Args:
        pages: of this process.
        folder: where each has its socket.
        index: of this process.
        count: of all.
    """

    def __init__(self, pages: Mapping[str, Page], folder: Path, index: int, count: int) -> None:
        self._pages = pages
        self._folder = folder
        self._index = index
        self._count = count
        self._own = HTTPServer(Pages(pages))
        self._shared: HTTPServer | None = None

    async def start(self, metrics_listener: socket.socket) -> None:
        """Answers the others from now on, and the network on the port of the metrics."""
        path = _path(self._folder, self._index)
        path.unlink(missing_ok=True)  # of a process that died in this place
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        await self._own.start(listener)
        self._shared = HTTPServer(
            Pages(
                {
                    "/metrics": self._metrics,
                    "/measures": self._measures,
                    "/measures/wait": self._wait,
                }
            )
        )
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
        told = {i: text.decode() for i, text in (await self._all("/metrics")).items()}
        return merged(told).encode()

    async def _metrics(self) -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, await self.metrics()

    async def _measures(self) -> tuple[str, bytes]:
        """The reports of all processes that answer; those of one that does not are missing."""
        told = (await self._all("/measures")).values()
        reports = [report for text in told for report in msgspec.json.decode(text)]
        return JSON, msgspec.json.encode(reports)

    async def _wait(self) -> tuple[str, bytes]:
        """As soon as any process says that a pool is wanted."""
        end = time.monotonic() + WAIT_S
        while True:
            kind, body = await self._measures()
            reports = msgspec.json.decode(body)
            wanted = any(pool["wanted"] for report in reports for pool in report.values())
            if wanted or time.monotonic() >= end:
                return kind, body
            await asyncio.sleep(ASK_AGAIN_S)

    async def _all(self, page: str) -> dict[int, bytes]:
        """By process, what each that answers says."""
        others = [i for i in range(self._count) if i != self._index]
        told = await asyncio.gather(*(_ask(_path(self._folder, i), page) for i in others))
        _, own = await self._pages[page]()
        found = {i: text for i, text in zip(others, told, strict=True) if text is not None}
        return {self._index: own, **found}


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


async def _ask(path: Path, page: str) -> bytes | None:
    """None when that process does not answer: it is starting, or gone."""
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


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
