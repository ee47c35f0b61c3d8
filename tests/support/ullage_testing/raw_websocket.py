"""A WebSocket client that shows each frame, and can send any bytes."""

import asyncio
import base64
from typing import Any

from wsproto.connection import Connection, ConnectionType
from wsproto.events import Event, Ping, TextMessage

KEY = base64.b64encode(b"0123456789abcdef")


def handshake(path: str = "/") -> bytes:
    """The request that opens a WebSocket."""
    return (
        b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n" % (path.encode(), KEY)
    )


class RawWebSocket:
    """A connection after its handshake. It answers no pings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.frames = Connection(ConnectionType.CLIENT)

    @classmethod
    async def open(cls, port: int, path: str = "/") -> "RawWebSocket":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(handshake(path))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        return cls(reader, writer)

    async def send(self, text: str, **more: Any) -> None:
        self.writer.write(self.frames.send(TextMessage(text, **more)))
        await self.writer.drain()

    async def events(self) -> list[Event]:
        """What comes next."""
        data = await self.reader.read(1 << 16)
        assert data, "the server has closed"
        self.frames.receive_data(data)
        return list(self.frames.events())

    async def messages(self, count: int) -> list[str]:
        """The next messages, each as a whole."""
        texts: list[str] = []
        while len(texts) < count:
            texts += [e.data for e in await self.events() if isinstance(e, TextMessage)]
        return texts

    async def pings(self, count: int) -> None:
        """Read until so many pings came, and nothing else."""
        while count > 0:
            events = await self.events()
            assert all(isinstance(event, Ping) for event in events), events
            count -= len(events)
