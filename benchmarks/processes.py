"""Ports for processes of a benchmark, and their end."""

import socket
import subprocess

_held: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return ports that nobody else is given while this process lives; servers may bind them."""
    for _ in range(count):
        _held.append(socket.socket())
        _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # llama.cpp sets it alone
        _held[-1].bind(("127.0.0.1", 0))
    return [int(each.getsockname()[1]) for each in _held[-count:]]


def end(process: "subprocess.Popen[bytes]", seconds: float = 40.0) -> None:
    """End a process with SIGTERM, and with SIGKILL after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
