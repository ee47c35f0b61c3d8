"""Drops the packets between a server's own processes, such as a router and its engines."""

import contextlib
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

TABLE = f"ullage_verify_{os.getpid()}"
"""Name of the nftables table with the rules that drop packets."""
TABLES = ("tcp", "tcp6")
"""Files of /proc/PID/net that list TCP sockets."""
ESTABLISHED = "01"
LISTENING = "0A"
NFT_TIMEOUT_S = 10.0
GRACE_S = 5
"""Seconds after which the kernel stops dropping packets, if nobody has removed the rules."""


class TcpSocket(NamedTuple):
    """One line of /proc/net/tcp."""

    local_port: int
    remote_port: int
    state: str
    """State of the connection as two hexadecimal digits, such as LISTENING."""
    inode: str


def shares_network(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process has the same network namespace as this one.

    Args:
        pid: id of the process.
        proc: folder with the kernel's process files.
    """
    try:
        return os.readlink(proc / str(pid) / "ns/net") == os.readlink(proc / "self/ns/net")
    except OSError:
        return False  # the process has exited, or belongs to another user


def internal_ports(pids: Iterable[int], proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the ports on which processes of a server listen for other processes of that server.

    A port counts only if one of the processes is connected to it now, so that the address of the
    server's clients is left out.

    Args:
        pids: ids of the server's processes.
        proc: folder with the kernel's process files.
    """
    listening: set[int] = set()
    connected: set[int] = set()
    for pid in pids:
        inodes = _socket_inodes(proc / str(pid))
        for each in _sockets(proc / str(pid)):
            if each.inode not in inodes:
                continue
            if each.state == LISTENING:
                listening.add(each.local_port)
            elif each.state == ESTABLISHED:
                connected.add(each.remote_port)
    return frozenset(listening & connected)


def _socket_inodes(process: Path) -> Set[str]:
    """Return the inodes of a process's sockets (empty if it has exited)."""
    inodes: set[str] = set()
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # the process has just closed the file
                kind, _, inode = os.readlink(link).partition(":")
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
    return inodes


def _sockets(process: Path) -> list[TcpSocket]:
    """Return all TCP sockets in a process's network namespace (empty if it has exited)."""
    lines: list[str] = []
    for name in TABLES:
        with contextlib.suppress(OSError):
            lines += (process / "net" / name).read_text().splitlines()[1:]
    return [parse_socket(line) for line in lines]


def parse_socket(line: str) -> TcpSocket:
    """Parse a line of /proc/net/tcp."""
    fields = line.split()
    local, remote, state = fields[1:4]
    return TcpSocket(_port(local), _port(remote), state, fields[9])


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


@contextlib.contextmanager
def dropped_packets(ports: Set[int], seconds: float) -> Iterator[None]:
    """Drop all TCP packets between this machine's own processes at the given ports for the block.

    Args:
        ports: the ports.
        seconds: duration of the block. Somewhat later, the kernel itself stops dropping packets, in
            case this process was killed.

    Raises:
        OSError: `nft` is missing, or this user may not set rules.
    """
    timeout_s = math.ceil(seconds) + GRACE_S
    elements = ", ".join(f"{port} timeout {timeout_s}s" for port in sorted(ports))
    rules = f"""
        table inet {TABLE} {{
            set ports {{
                type inet_service
                flags timeout
                elements = {{ {elements} }}
            }}
            chain input {{
                type filter hook input priority 0;
                iif lo tcp dport @ports drop
                iif lo tcp sport @ports drop
            }}
        }}
    """
    try:
        _nft(rules)
        yield
    finally:
        # Without the rules, there is nothing to delete.
        with contextlib.suppress(OSError):
            _nft(f"delete table inet {TABLE}")


def _nft(rules: str) -> None:
    """Apply nftables rules.

    Raises:
        OSError: `nft` is missing or has refused the rules.
    """
    command = ["nft", "--file", "-"]
    try:
        done = subprocess.run(
            command, input=rules, capture_output=True, text=True, timeout=NFT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"nft did not end within {NFT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip().partition("\n")[0] or f"nft: status {done.returncode}")
