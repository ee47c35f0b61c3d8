"""Injects faults into a server: sends signals, exhausts memory, or deletes a pod."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

import grpc

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage_verify.memory_limit import memory_limit
from ullage_verify.processes import ServerProcesses
from ullage_verify.target import TargetError

GROUP = f"ullage-verify-{os.getpid()}"
"""Name of the control group that caps a process's memory."""
FREE_BYTES = 128 << 20
"""Bytes by which the control group's limit exceeds its use before the group is filled."""
DELETE_TIMEOUT_S = 60.0
ADMIN_TIMEOUT_S = 10.0
OOM_AFTER_STEPS = 0
"""Number of engine steps before an injected fault.

With 0, the next step fails, so that no fault is left for later requests.
"""

Fault = Callable[[], Awaitable[None]]
"""A function that injects a fault into the server, and returns once the fault has happened.

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
        yield {
            "SIGKILL of the busiest process": partial(_signal, processes, signal.SIGKILL),
            "SIGSTOP of the busiest process": partial(_signal, processes, signal.SIGSTOP),
            "full memory, and the kernel kills": partial(_exhaust_memory, processes),
        }
    finally:
        processes.resume()


async def _signal(processes: ServerProcesses, number: signal.Signals) -> None:
    await asyncio.to_thread(processes.send, number)


async def _exhaust_memory(processes: ServerProcesses) -> None:
    """Make the kernel OOM-kill the server's busiest process, by capping and using up its memory.

    The cap applies only to that process, so the kernel cannot kill any of the server's other
    processes.

    Raises:
        TargetError: this user may not limit memory, or the kernel has killed no process in time.
    """
    try:
        with memory_limit(GROUP) as group:
            try:
                busiest = await asyncio.to_thread(processes.busiest)
                group.take(busiest or processes.pid)
                group.allow(FREE_BYTES)
                await asyncio.to_thread(group.kill_largest)
            finally:
                group.release()
    except TimeoutError as error:
        raise TargetError(str(error)) from None
    except OSError as error:
        raise TargetError(f"no control group for the server ({error}); run as root") from None


def admin_faults(address: str) -> Mapping[str, Fault]:
    """Return the faults that an Ullage engine can inject into itself, by name.

    Args:
        address: gRPC address of the engine, HOST:PORT.
    """
    return {
        "a step out of memory": partial(_inject, address, admin_pb2.FAULT_KIND_OOM),
        "death of the worker": partial(_inject, address, admin_pb2.FAULT_KIND_WORKER_KILL),
    }


async def _inject(address: str, kind: admin_pb2.FaultKind) -> None:
    request = admin_pb2.InjectFaultRequest(kind=kind, after_steps=OOM_AFTER_STEPS)
    async with grpc.aio.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            await admin.InjectFault(request, timeout=ADMIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--admin {address}: {error.details()}") from None


def pod_faults(namespace: str, pod: str) -> Mapping[str, Fault]:
    """Return the faults that kubectl can inject into a pod, by name.

    Args:
        namespace: namespace of the pod.
        pod: name of an engine's pod.
    """
    return {"death of the pod": partial(_delete_pod, namespace, pod)}


async def _delete_pod(namespace: str, pod: str) -> None:
    command = ["kubectl", "--namespace", namespace, "delete", "pod", pod]
    options = ["--grace-period=0", "--force", "--wait=false"]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise TargetError("kubectl is missing; install it to make faults in a cluster") from None

    try:
        _, error = await asyncio.wait_for(process.communicate(), DELETE_TIMEOUT_S)
    except TimeoutError:
        raise TargetError(f"{' '.join(command)}: no answer in {DELETE_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        # Force deletion prints a warning, too, so only the status tells a failure.
        raise TargetError(f"{' '.join(command)}: {error.decode().strip()}")
