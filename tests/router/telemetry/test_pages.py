"""The pages of the metrics port when one of them fails."""

import asyncio
import json
import logging

import pytest

from ullage_common.process.addresses import listen
from ullage_router.errors import unknown_path
from ullage_router.http.monitoring import Pages
from ullage_router.http.server import HTTPServer


async def broken() -> tuple[str, bytes]:
    raise RuntimeError("a collector's bug")


async def refused() -> tuple[str, bytes]:
    raise unknown_path("/refused", see="/metrics")


async def ask(port: int, path: str) -> tuple[str, dict[str, dict[str, str]]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, json.loads(body)


def test_a_page_that_raises_is_answered_as_json_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        server = HTTPServer(Pages({"/metrics": broken, "/refused": refused}, lambda _: b"{}"))
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        await server.start(listener)
        try:
            with caplog.at_level(logging.ERROR):
                head, body = await ask(port, "/metrics")
            assert head.startswith("HTTP/1.1 500 ")
            assert "content-type: application/json" in head
            assert body["error"]["code"] == "INTERNAL"
            assert "collector" not in json.dumps(body)
            (record,) = [r for r in caplog.records if r.name == "ullage_router.http.monitoring"]
            assert record.exc_info
            assert str(record.exc_info[1]) == "a collector's bug"

            caplog.clear()
            head, body = await ask(port, "/refused")
            assert head.startswith("HTTP/1.1 404 ")
            assert not caplog.records  # a refusal is no failure of the router

            head, _ = await ask(port, "/stats")
            assert head.startswith("HTTP/1.1 200 ")
        finally:
            await server.stop(1.0)

    asyncio.run(scenario())
