"""Bytes to a server of this machine, and its whole answer."""

import socket


def exchange(port: int, data: bytes) -> bytes:
    """Send bytes and return all that comes back; leaves the lock while it waits."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        while part := client.recv(1 << 16):
            answer += part
    return bytes(answer)
