"""Loopback ports for the pods of a plan."""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ullage_operator.local.pods import Manifest, pod_names, workloads

LOOPBACK = "127.0.0.1"


class PortBusy(Exception):
    """A port that the user asked for is taken; the message names the flag."""


def assign(
    objects: Sequence[Manifest], fixed: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """A port for every named container port of every pod; `fixed` wins, 0 means any.

    Raises:
        PortBusy: a fixed port cannot be bound.
    """
    with_ports: dict[str, dict[str, int]] = {}
    reserved: list[socket.socket] = []
    try:
        for workload in workloads(objects):
            for name in pod_names(workload):
                wanted = fixed.get(workload["metadata"]["name"], {})
                with_ports[name] = {
                    port: reserve(wanted.get(port, 0), port, reserved)
                    for port in container_ports(workload)
                }
    finally:
        for sock in reserved:
            sock.close()
    return with_ports


def container_ports(workload: Mapping[str, Any]) -> list[str]:
    container = workload["spec"]["template"]["spec"]["containers"][0]
    return [port["name"] for port in container["ports"]]


def reserve(port: int, name: str, reserved: list[socket.socket]) -> int:
    """Binds the port until all are assigned, so that no two pods get the same one."""
    sock = socket.socket()
    # As servers do: a port whose old connections linger in TIME_WAIT is free.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, port))
    except OSError as error:
        sock.close()
        raise PortBusy(
            f"port {port} on {LOOPBACK} is taken; choose another with --{name}-port, or 0 for any"
        ) from error
    reserved.append(sock)
    return int(sock.getsockname()[1])
