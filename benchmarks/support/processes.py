"""Reserves ports for the processes of a benchmark, and ends processes."""

import atexit
import contextlib
import socket
import subprocess

_held = contextlib.ExitStack()
atexit.register(_held.close)


def free_ports(count: int) -> list[int]:
    """Reserve free ports for the lifetime of this process. Servers can still bind these ports."""
    ports = []
    for _ in range(count):
        held = _held.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # llama.cpp sets only SO_REUSEPORT.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        ports.append(int(held.getsockname()[1]))
    return ports


def end(process: "subprocess.Popen[bytes]", seconds: float = 40.0) -> None:
    """End a process with SIGTERM, and with SIGKILL after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
