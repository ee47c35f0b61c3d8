"""Addresses with ports: how they are written, and where a process listens.

A process that is told no address listens at all of them, of IPv4 and of IPv6, so that the same
configuration serves clusters of either kind and of both.
"""

import ipaddress
import socket

EVERY_IPV6 = "::"
_EVERY_IPV4 = "0.0.0.0"
_BACKLOG = 128


def host_of(host: str | None) -> str:
    """Return the address to listen at: `host`, or the wildcard address, of IPv4 if the kernel has
    no IPv6."""
    if host is not None:
        return host.removeprefix("[").removesuffix("]")
    return EVERY_IPV6 if socket.has_dualstack_ipv6() else _EVERY_IPV4


def joined(host: str, port: int | str) -> str:
    """Return `host:port`, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(target: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of `host:port` or `[ip]:port`.

    Raises:
        ValueError: it is neither.
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


def listen(host: str | None, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: None for every address.

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
