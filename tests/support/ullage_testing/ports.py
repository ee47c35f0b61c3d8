"""Ports of loopback for servers that bind them later, or once more after a stop.

A socket that is bound and never listens keeps its port: the kernel gives it to nobody who asks for
any port, and servers bind it all the same, as they and the socket set SO_REUSEADDR.
"""

import socket

_held: list[socket.socket] = []


def hold() -> socket.socket:
    """Returns a socket that keeps a free port until it is closed."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def free_port() -> int:
    """Returns a port that is kept as long as this process lives."""
    _held.append(hold())
    return port_of(_held[-1])
