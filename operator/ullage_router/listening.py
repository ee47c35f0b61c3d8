"""Ports: taken alone, or shared with the other processes of the same router."""

import socket


class CannotListen(Exception):
    """A port is taken or not allowed; the message names it."""


def listen(host: str, port: int, is_shared: bool = False, name: str = "http") -> socket.socket:
    """A listening socket.

    Args:
        is_shared: others of the same user may listen on the port too (SO_REUSEPORT).
        name: of the section of the configuration, for the error.

    Raises:
        CannotListen: the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=is_shared)
    except OSError as error:
        raise _cannot(name, host, port, error) from error


def reserve(name: str, host: str, port: int) -> socket.socket:
    """A socket that holds a port for processes that share it, and takes no connection.

    Raises:
        CannotListen: the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port:  # a program that does not share it must be noticed here and not by the children
        listen(host, port, name=name).close()
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise _cannot(name, host, port, error) from error
    return holder


def _cannot(name: str, host: str, port: int, error: OSError) -> CannotListen:
    return CannotListen(f"{name}: {host}:{port}: {error.strerror}; choose another port")
