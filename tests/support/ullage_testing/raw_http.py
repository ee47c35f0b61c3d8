"""Sends bytes to a local server, and reads its whole response."""

import socket


def exchange(port: int, data: bytes) -> bytes:
    """Send bytes and return the whole response. Release the GIL while waiting."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        while part := client.recv(1 << 16):
            answer += part
    return bytes(answer)
