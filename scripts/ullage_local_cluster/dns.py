"""A DNS server for only the cluster's own names, over UDP and TCP (RFC 1035)."""

import random
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Records = Mapping[str, list[str]]
"""The IPv4 addresses of each name."""
PORT = 53
TTL_S = 5
UDP_BYTES = 512
"""Maximum size in bytes of an answer that every client accepts over UDP."""
TCP_BYTES = 65535
TYPE_A = 1
TYPE_ANY = 255
CLASS_IN = 1
HEADER = struct.Struct(">HHHHHH")
"""DNS header: id, flags, and counts of questions, answers, authorities and additional records."""
IS_ANSWER = 0x8400
"""The flags of an authoritative response."""
TRUNCATED = 0x0200
RECURSION = 0x0180
"""Flags for recursion desired and available. Without them, resolvers would try another server."""
NXDOMAIN = 3
POINTER_TO_QUESTION = b"\xc0\x0c"


class QuietErrors(socketserver.BaseServer):
    """Server mixin that logs a malformed query in one line, without a traceback."""

    def handle_error(self, request: object, client_address: object) -> None:
        print(f"DNS: {client_address}: {sys.exception()}", flush=True)


class UDPServer(QuietErrors, socketserver.UDPServer):
    pass


class TCPServer(QuietErrors, socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def answer(query: bytes, records: Records, limit: int) -> bytes:
    """Return the answer to a DNS query for one name.

    Args:
        query: The message without TCP's length prefix.
        records: The addresses of all existing names.
        limit: Maximum bytes of the answer. A longer answer is emptied and marked as truncated.

    Raises:
        ValueError: The query is not a DNS message.
    """
    try:
        identity = HEADER.unpack_from(query)[0]
        name, kind, end = read_question(query)
    except (IndexError, struct.error) as broken:
        raise ValueError(f"not a DNS query: {query[:64]!r}") from broken

    addresses = list(records.get(name, ()))
    # Clients take the first address.
    random.shuffle(addresses)
    answers = addresses if kind in (TYPE_A, TYPE_ANY) else []
    flags = IS_ANSWER | RECURSION | (0 if name in records else NXDOMAIN)
    question = query[HEADER.size : end]
    body = b"".join(
        POINTER_TO_QUESTION
        + struct.pack(">HHIH", TYPE_A, CLASS_IN, TTL_S, 4)
        + socket.inet_aton(address)
        for address in answers
    )
    if HEADER.size + len(question) + len(body) > limit:
        return HEADER.pack(identity, flags | TRUNCATED, 1, 0, 0, 0) + question
    return HEADER.pack(identity, flags, 1, len(answers), 0, 0) + question + body


def read_question(query: bytes) -> tuple[str, int, int]:
    """Return the question's name in lower case, its type, and its end position."""
    words = []
    at = HEADER.size
    while length := query[at]:
        words.append(query[at + 1 : at + 1 + length].decode("latin-1").lower())
        at += 1 + length
    kind, _ = struct.unpack_from(">HH", query, at + 1)
    return ".".join(words), kind, at + 5


@contextmanager
def serve(address: str, records: Callable[[], Records]) -> Iterator[None]:
    """Answer DNS queries in separate threads while the block runs."""

    class OverUDP(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, server = self.request
            server.sendto(answer(query, records(), UDP_BYTES), self.client_address)

    class OverTCP(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            while prefix := self.rfile.read(2):
                query = self.rfile.read(int.from_bytes(prefix))
                reply = answer(query, records(), TCP_BYTES)
                self.wfile.write(len(reply).to_bytes(2) + reply)

    with UDPServer((address, PORT), OverUDP) as udp, TCPServer((address, PORT), OverTCP) as tcp:
        for server in (udp, tcp):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            for server in (udp, tcp):
                server.shutdown()
