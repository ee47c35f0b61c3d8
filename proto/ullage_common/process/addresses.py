"""Parses and formats network addresses, reads DNS answers, and opens listening sockets.

A process without a configured address listens on all IPv4 and IPv6 addresses, so the same
configuration serves clusters of either family, or of both.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

EVERY_IPV6 = "::"
_EVERY_IPV4 = "0.0.0.0"
_BACKLOG = 128

NO_RECORDS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Errors of getaddrinfo that mean "no records", as for a headless Service without pods."""


def host_of(host: str | None) -> str:
    """Return the address to listen on, without brackets.

    Args:
        host: the configured address, or None for all addresses. None gives the IPv6 wildcard
            address if IPv6 sockets also accept IPv4 connections, and otherwise the IPv4 one.
    """
    if host is not None:
        return host.removeprefix("[").removesuffix("]")
    return EVERY_IPV6 if socket.has_dualstack_ipv6() else _EVERY_IPV4


def joined(host: str, port: int | str) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(target: str) -> tuple[str, int]:
    """Split `host:port` or `[ip]:port` into the host, without brackets, and the port.

    Raises:
        ValueError: the target has neither of these forms.
    """
    host, _, port = target.rpartition(":")
    inner = host.removeprefix("[").removesuffix("]")
    is_bracketed = host == f"[{inner}]"
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if not (inner and is_port) or is_bracketed != _is_ipv6(inner) or (":" in inner) != is_bracketed:
        raise ValueError(
            f"{target!r} is not host:port, such as engines:9000, 10.0.0.7:9000 or [fd00::7]:9000"
        )
    return inner, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_ip(host: str) -> bool:
    """Return whether a host, with or without brackets, is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def by_best_family(records: Iterable[tuple[Any, ...]], port: str) -> set[str]:
    """Return a getaddrinfo result's addresses from a single IP family, preferring IPv4.

    A process may have both an A and an AAAA record. Using both families would count it twice.

    Returns:
        `ip:port` for every A record, or `[ip]:port` for every AAAA record if there is no A record.
    """
    by_family: dict[int, set[str]] = {}
    for family, *_, (ip, *_) in records:
        by_family.setdefault(family, set()).add(joined(str(ip), port))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or set()


def listen(host: str | None, port: int) -> socket.socket:
    """Open a listening TCP socket.

    Args:
        host: the address to listen on, or None for all addresses.

    Raises:
        OSError: the port cannot be used.
    """
    address = host_of(host)
    is_ipv6 = ":" in address
    listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)

    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            is_only = address != EVERY_IPV6 or not socket.has_dualstack_ipv6()
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(is_only))
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
