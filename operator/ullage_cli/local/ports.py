"""Chooses loopback ports for all pods, and reserves them until the pods have bound them."""

import contextlib
import socket
from collections.abc import Mapping, Sequence

from ullage_cli.local.workloads import Manifest, container_ports, pod_names, workloads
from ullage_operator.api.errors import LocalFailure

LOOPBACK = "127.0.0.1"

PodPorts = Mapping[str, Mapping[str, int]]
"""Loopback port of every named container port, by pod name."""


def assign_ports(
    objects: Sequence[Manifest],
    fixed: Mapping[str, Mapping[str, int]],
    kept: contextlib.ExitStack | None = None,
) -> PodPorts:
    """Return a port for every named container port of every pod.

    Args:
        objects: the operator's plan.
        fixed: ports that the user chose, by workload and container port (0 for any free port).
        kept: exit stack that holds the reservations until it is closed. Without one, the ports are
            released before this function returns.

    Raises:
        LocalFailure: a fixed port is used twice or cannot be bound. The message names the flags.
    """
    _check_distinct(fixed)

    assigned: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as reserved:
        for workload in workloads(objects):
            chosen = fixed.get(workload["metadata"]["name"], {})
            for name in pod_names(workload):
                assigned[name] = {
                    port: _reserve(chosen.get(port, 0), port, reserved)
                    for port in container_ports(workload)
                }

        if kept is not None:
            kept.callback(reserved.pop_all().close)

    return assigned


def _check_distinct(fixed: Mapping[str, Mapping[str, int]]) -> None:
    """Raise an error if the user chose the same port for two listeners."""
    given = [port for ports in fixed.values() for port in ports.values() if port]
    if twice := next((port for port in given if given.count(port) > 1), 0):
        raise LocalFailure(
            f"port {twice} is given twice; choose another with --http-port or --grpc-port, "
            "or 0 for any"
        )


def _reserve(port: int, name: str, reserved: contextlib.ExitStack) -> int:
    """Bind a port, so that the kernel does not hand it out as an ephemeral port.

    The pod's server can still bind the port, because this socket does not listen and both sockets
    set SO_REUSEADDR.
    """
    sock = socket.socket()
    # SO_REUSEADDR also allows a port whose old connections linger in TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    try:
        sock.bind((LOOPBACK, port))
    except OSError as error:
        sock.close()
        raise LocalFailure(
            f"port {port} on {LOOPBACK} is taken; choose another with --{name}-port, or 0 for any"
        ) from error

    reserved.enter_context(sock)
    return int(sock.getsockname()[1])
