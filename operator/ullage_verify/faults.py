"""Injects faults into a server: signals, full memory or disks, lost packets, deleted pods."""

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import grpc

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage_verify.memory_limit import memory_limit
from ullage_verify.neighbour import NeighbourError, neighbour
from ullage_verify.partition import dropped_packets, internal_ports, shares_network
from ullage_verify.processes import ServerProcesses
from ullage_verify.target import TargetError

GROUP = f"ullage-verify-{os.getpid()}"
"""Name of the control group that caps a process's memory."""
FREE_BYTES = 128 << 20
"""Bytes by which the control group's limit exceeds its use before the group is filled."""
KUBECTL_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 30.0
"""Longest time for which pods are evicted from a node, in seconds."""
ADMIN_TIMEOUT_S = 10.0
OUT_OF_TIME = "global timeout"
"""Words with which kubectl ends a drain that took too long."""
EVICTED = " evicted"
"""Words with which kubectl reports each pod that has left a drained node."""
NEIGHBOUR_ROUNDS = 3
"""How often a neighbour takes memory and frees it, in a fault."""
PARTITION_S = 3.0
"""Number of seconds for which the packets between a server's processes are dropped."""
FULL_DISK_S = 3.0
"""Number of seconds for which a file system stays full."""
MAX_FILL_BYTES = 8 << 30
"""Largest free space of a file system that may be filled."""
FILL_STEP_BYTES = 1 << 20
CLOCK_JUMP_S = 3600.0
"""Number of seconds by which the machine's clock jumps, first forward and then back."""
CLOCK_WRONG_S = 2.0
"""Number of seconds for which the clock is wrong."""
OOM_AFTER_STEPS = 0
"""Number of engine steps before an injected fault.

With 0, the next step fails, so that no fault is left for later requests.
"""

Fault = Callable[[], Awaitable[float]]
"""A function that injects a fault into the server, and returns once the fault has happened.

Faults that last, such as a full disk, are over by then.

Returns:
    The time at which the server was hit, on the monotonic clock.

Raises:
    TargetError: the fault cannot be injected into this server.
"""


@contextlib.contextmanager
def process_faults(pid: int) -> Iterator[Mapping[str, Fault]]:
    """Yield the faults that can be injected into a server on this machine, by name.

    At the end of the `with` block, processes that a fault has stopped are resumed if they still
    exist.

    Args:
        pid: the id of the server's first process.

    Raises:
        TargetError: there is no such process.
    """
    processes = ServerProcesses(pid)
    if not processes.family():
        raise TargetError(f"--pid {pid}: no such process; give the server's first process")
    try:
        yield {name: partial(fault, processes) for name, fault in _PROCESS_FAULTS.items()}
    finally:
        processes.resume()


async def _kill(processes: ServerProcesses) -> float:
    await asyncio.to_thread(processes.send, signal.SIGKILL)
    return time.monotonic()


async def _stop(processes: ServerProcesses) -> float:
    await asyncio.to_thread(processes.send, signal.SIGSTOP)
    return time.monotonic()


async def _exhaust_memory(processes: ServerProcesses) -> float:
    """Make the kernel OOM-kill the server's busiest process, by capping and using up its memory.

    The cap applies only to that process, so the kernel cannot kill any of the server's other
    processes.

    Raises:
        TargetError: this user may not limit memory, or the kernel has killed no process in time.
    """
    with _needs_root("no control group for the server"), memory_limit(GROUP) as group:
        try:
            busiest = await asyncio.to_thread(processes.busiest)
            group.take(busiest or processes.pid)
            await asyncio.to_thread(group.kill_largest, FREE_BYTES)
            return time.monotonic()
        finally:
            group.release()


async def _partition(processes: ServerProcesses) -> float:
    """Drop the packets between the server's processes for PARTITION_S seconds.

    Raises:
        TargetError: the processes are not connected by TCP or have another network namespace than
            this command, or this user may not drop packets.
    """
    if not shares_network(processes.pid):
        raise TargetError(
            f"--pid {processes.pid} has another network namespace; run this command in it "
            f"(nsenter --target {processes.pid} --net)"
        )
    ports = await asyncio.to_thread(internal_ports, processes.family())
    if not ports:
        raise TargetError(
            f"the processes of --pid {processes.pid} are not connected to each other by TCP"
        )
    with _needs_root("packets cannot be dropped"), dropped_packets(ports, PARTITION_S):
        hit_at = time.monotonic()
        await asyncio.sleep(PARTITION_S)
    return hit_at


async def _neighbour(processes: ServerProcesses) -> float:
    """Let another process take memory beside the server and free it, NEIGHBOUR_ROUNDS times.

    Raises:
        TargetError: too little memory is available.
    """
    with _neighbour_errors():
        async with neighbour(processes.pid, NEIGHBOUR_ROUNDS) as other:
            hit_at = await other.taken()
            await other.ended()
    return hit_at


async def _kill_beside_neighbour(processes: ServerProcesses) -> float:
    """Kill the server's busiest process while another process takes memory and frees it.

    So memory becomes free while the server measures it for its next start.

    Raises:
        TargetError: too little memory is available.
    """
    with _neighbour_errors():
        async with neighbour(processes.pid, NEIGHBOUR_ROUNDS) as other:
            await other.taken()
            hit_at = await _kill(processes)
            await other.ended()
    return hit_at


@contextlib.contextmanager
def _neighbour_errors() -> Iterator[None]:
    """Turn the errors of a neighbour into a TargetError."""
    try:
        yield
    except TimeoutError:
        raise TargetError("the neighbour did not take its memory in time; free memory") from None
    except NeighbourError as error:
        raise TargetError(str(error)) from None


_PROCESS_FAULTS: Mapping[str, Callable[[ServerProcesses], Awaitable[float]]] = {
    "SIGKILL of the busiest process": _kill,
    "SIGSTOP of the busiest process": _stop,
    "full memory, and the kernel kills": _exhaust_memory,
    "partition between the processes": _partition,
    "a neighbour takes memory and frees it": _neighbour,
    "SIGKILL while a neighbour takes memory and frees it": _kill_beside_neighbour,
}
"""Faults of the server's processes by name, which are those of `--pid`.

Neighbours that free memory end other servers, as in vllm#56830.
"""
PROCESS_FAULT_NAMES = tuple(_PROCESS_FAULTS)


def disk_faults(folder: Path) -> Mapping[str, Fault]:
    """Return the faults that can be made on the file system of a folder, by name.

    Args:
        folder: a folder of the file system to which the server writes.

    Raises:
        TargetError: the folder does not exist, or its file system has too much free space.
    """
    try:
        free_bytes = _free_bytes(folder)
    except OSError as error:
        raise TargetError(f"--disk {folder}: {error.strerror}; give an existing folder") from None
    if free_bytes > MAX_FILL_BYTES:
        raise TargetError(
            f"--disk {folder}: {free_bytes >> 30} GiB are free, and filling them may harm others; "
            f"give a file system with at most {MAX_FILL_BYTES >> 30} GiB, such as a small tmpfs"
        )
    return {"full disk": partial(_fill_disk, folder)}


def _free_bytes(folder: Path) -> int:
    """Return the bytes of a folder's file system that root may use."""
    stats = os.statvfs(folder)
    return stats.f_bfree * stats.f_frsize


async def _fill_disk(folder: Path) -> float:
    """Fill the folder's file system for FULL_DISK_S seconds.

    Raises:
        TargetError: this user may not write there, or the file system has too much free space.
    """
    if _free_bytes(folder) > MAX_FILL_BYTES:
        raise TargetError(f"--disk {folder}: more than {MAX_FILL_BYTES >> 30} GiB are free now")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            await asyncio.to_thread(_fill, file.fileno())
            hit_at = time.monotonic()
            while time.monotonic() < hit_at + FULL_DISK_S:
                # The server may have deleted files, whose space must not stay free.
                await asyncio.to_thread(_fill, file.fileno())
                await asyncio.sleep(0.1)
    except OSError as error:
        raise TargetError(f"--disk {folder}: {error.strerror}") from None
    return hit_at


def _fill(file: int) -> None:
    """Extend a file until its file system has no free space left."""
    step = FILL_STEP_BYTES
    while step >= 1:
        try:
            os.posix_fallocate(file, os.fstat(file).st_size, step)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            step //= 2


def clock_faults() -> Mapping[str, Fault]:
    """Return the faults that can be made with this machine's clock, by name."""
    return {"a clock that jumps": _jump_clock}


async def _jump_clock() -> float:
    """Set this machine's clock forward by CLOCK_JUMP_S, and back after CLOCK_WRONG_S seconds.

    Raises:
        TargetError: this user may not set the clock.
    """
    with _needs_root("the clock cannot be set"):
        _shift_clock(CLOCK_JUMP_S)
        hit_at = time.monotonic()
        try:
            await asyncio.sleep(CLOCK_WRONG_S)
        finally:
            _shift_clock(-CLOCK_JUMP_S)
    return hit_at


def _shift_clock(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


@contextlib.contextmanager
def _needs_root(failure: str) -> Iterator[None]:
    """Turn an OSError of the block into a TargetError that says what failed, and the remedy."""
    try:
        yield
    except TimeoutError as error:
        raise TargetError(str(error)) from None  # no matter of rights
    except OSError as error:
        raise TargetError(f"{failure} ({error}); run as root") from None


def admin_faults(address: str) -> Mapping[str, Fault]:
    """Return the faults that an Ullage engine can inject into itself, by name.

    Args:
        address: gRPC address of the engine, HOST:PORT.
    """
    return {
        "a step out of memory": partial(_inject, address, admin_pb2.FAULT_KIND_OOM),
        "death of the worker": partial(_inject, address, admin_pb2.FAULT_KIND_WORKER_KILL),
        "a step without an end": partial(_inject, address, admin_pb2.FAULT_KIND_BUSY_HANG),
    }


async def _inject(address: str, kind: admin_pb2.FaultKind) -> float:
    request = admin_pb2.InjectFaultRequest(kind=kind, after_steps=OOM_AFTER_STEPS)
    async with grpc.aio.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            await admin.InjectFault(request, timeout=ADMIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--admin {address}: {error.details()}") from None
    return time.monotonic()


def pod_faults(namespace: str, pods: Iterable[str]) -> Mapping[str, Fault]:
    """Return the faults that kubectl can inject into pods, by name.

    Args:
        namespace: namespace of the pods that do not name theirs.
        pods: names of pods, or labels as NAME=VALUE, each with an optional NAMESPACE: before it.
    """
    return {f"death of the pod {pod}": partial(_delete_pod, namespace, pod) for pod in pods}


async def _delete_pod(default_namespace: str, pod: str) -> float:
    namespace, _, name = pod.rpartition(":")
    which = ["--selector", name] if "=" in name else [name]
    force = ["--grace-period=0", "--force", "--wait=false", "--output=name"]
    deleted = await _kubectl(namespace or default_namespace, "delete", "pod", *which, *force)
    if not deleted.strip():
        raise TargetError(f"--pod {pod}: no pod has these labels; see kubectl get pods")
    return time.monotonic()


def node_faults(namespace: str, node: str, selector: str) -> Mapping[str, Fault]:
    """Return the faults that kubectl can inject into a node, by name.

    Args:
        namespace: namespace of the service.
        node: name of the node.
        selector: labels of the pods that may be evicted.
    """
    return {f"drain of the node {node}": partial(_drain, namespace, node, selector)}


async def _drain(namespace: str, node: str, selector: str) -> float:
    """Evict pods from a node for at most DRAIN_TIMEOUT_S seconds, and then uncordon it.

    Raises:
        TargetError: the node is cordoned already, kubectl fails, or no pod was evicted.
    """
    if await _kubectl(namespace, "get", "node", node, "--output=jsonpath={.spec.unschedulable}"):
        raise TargetError(f"--node {node}: it is cordoned already; name another, or uncordon it")

    hit_at = time.monotonic()
    options = [f"--pod-selector={selector}", f"--timeout={DRAIN_TIMEOUT_S:g}s"]
    options += ["--ignore-daemonsets", "--delete-emptydir-data"]
    try:
        status, output, error = await _run_kubectl(namespace, "drain", node, *options)
    finally:
        await _kubectl(namespace, "uncordon", node)
    # On the last node, the disruption budget keeps an engine where it is, and time runs out.
    if status and OUT_OF_TIME not in error:
        raise TargetError(f"kubectl drain {node}: {error.strip()}")
    if EVICTED not in output:
        raise TargetError(f"--node {node}: no engine of the service was evicted from it")
    return hit_at


async def _kubectl(namespace: str, *arguments: str) -> str:
    """Run kubectl, and return its output.

    Raises:
        TargetError: kubectl is missing, fails, or does not end within KUBECTL_TIMEOUT_S.
    """
    status, output, error = await _run_kubectl(namespace, *arguments)
    if status:
        # Force deletion prints a warning, too, so only the status tells a failure.
        raise TargetError(f"kubectl --namespace {namespace} {' '.join(arguments)}: {error.strip()}")
    return output


async def _run_kubectl(namespace: str, *arguments: str) -> tuple[int, str, str]:
    """Run kubectl, and return its exit status, its output and its error output.

    Raises:
        TargetError: kubectl is missing, or does not end within KUBECTL_TIMEOUT_S.
    """
    command = ["kubectl", "--namespace", namespace, *arguments]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    except FileNotFoundError:
        raise TargetError("kubectl is missing; install it to make faults in a cluster") from None

    try:
        output, error = await asyncio.wait_for(process.communicate(), KUBECTL_TIMEOUT_S)
    except TimeoutError:
        raise TargetError(f"{' '.join(command)}: no answer in {KUBECTL_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(), error.decode()
