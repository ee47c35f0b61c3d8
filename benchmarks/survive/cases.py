"""What happens to the servers, by the report that named it: requests, neighbours and faults."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.servers import Running
from benchmarks.survive.container import Container, neighbour
from benchmarks.survive.gateway import WORKERS
from benchmarks.survive.servers import Setting
from ullage_verify.client import ChatAnswer
from ullage_verify.memory_limit import MemoryLimit
from ullage_verify.processes import PROC, ServerProcesses
from ullage_verify.scenarios import oom as requests
from ullage_verify.target import Target

CROWD = 60
CROWD_TOKENS = 600
FULL_POOL = 24
"""Number of prompts that come at once if the KV cache is small."""
LEFT_BYTES = 300 << 20
"""Memory that a server may still take during a case of requests."""
ROOM_BYTES = 128 << 20
"""Memory that is left when the group is filled until the kernel kills."""
NEIGHBOUR_BYTES = 512 << 20
"""Memory that the neighbour takes and frees."""
NEIGHBOUR_PAUSE_S = 1.0
NEIGHBOUR_LIMIT_BYTES = 5 << 30
"""Memory of the container that a server and its neighbour share."""
ONE_LIMIT_BYTES = 3 << 30
"""Memory of the container that is all there is, for host and device."""


@dataclass(frozen=True)
class Scene:
    """A server in its control group, at the moment of a case."""

    target: Target
    running: Running
    group: MemoryLimit

    @property
    def processes(self) -> ServerProcesses:
        return ServerProcesses(self.running.process.pid)


class NotPlayedError(Exception):
    """Raised if a case cannot happen to a server. The message says why."""


Happen = Callable[[Scene], Awaitable[Sequence[ChatAnswer]]]
"""Function that lets the case happen, and returns the answers to who caused it.

Raises:
    NotPlayedError: it cannot happen to this server.
"""
Surround = Callable[[Container], contextlib.AbstractContextManager[None]]
"""Function that returns what surrounds the server from before its start to its end."""


@contextlib.contextmanager
def surrounded_by_nothing(_: Container) -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Case:
    """One thing that happens, and how the server is started for it."""

    about: str
    happen: Happen
    report: str = ""
    """Public reports of it, as project#number (empty without one)."""
    setting: Setting = "ordinary"
    surround: Surround = surrounded_by_nothing
    is_alone: bool = False
    """Whether the server must be a new one."""
    is_for_gateways: bool = False


# --- Requests ---


def of_requests(
    provoke: Callable[[Target], Awaitable[Sequence[ChatAnswer]]], left_bytes: int = LEFT_BYTES
) -> Happen:
    """Return the case in which a client sends these requests while little memory is left."""

    async def happen(scene: Scene) -> Sequence[ChatAnswer]:
        scene.group.allow(left_bytes)
        return await provoke(scene.target)

    return happen


def alone(provoke: Callable[[Target], Awaitable[Sequence[ChatAnswer]]]) -> Happen:
    """Return the case in which a client sends these requests, with no other limit than before."""

    async def happen(scene: Scene) -> Sequence[ChatAnswer]:
        return await provoke(scene.target)

    return happen


async def crowd(target: Target, count: int = CROWD) -> Sequence[ChatAnswer]:
    tokens = min(CROWD_TOKENS, target.usable // 3)
    asked = (
        target.client.chat(target.model, target.prompt(7_000 + number, tokens), 32)
        for number in range(count)
    )
    return await asyncio.gather(*asked)


async def full_pool(target: Target) -> Sequence[ChatAnswer]:
    return await crowd(target, FULL_POOL)


async def adapters(target: Target) -> Sequence[ChatAnswer]:
    if not target.adapters:
        raise NotPlayedError("the server lists no adapters")
    return await requests.adapters(target)


# --- Faults ---


async def kill(scene: Scene) -> Sequence[ChatAnswer]:
    await asyncio.to_thread(scene.processes.send, signal.SIGKILL)
    return ()


async def hang(scene: Scene) -> Sequence[ChatAnswer]:
    await asyncio.to_thread(scene.processes.send, signal.SIGSTOP)
    return ()


async def oom(scene: Scene) -> Sequence[ChatAnswer]:
    await asyncio.to_thread(scene.group.kill_largest, ROOM_BYTES)
    return ()


def to_worker(number: signal.Signals) -> Happen:
    """Return the case in which one of two workers, with all its processes, gets a signal."""

    async def happen(scene: Scene) -> Sequence[ChatAnswer]:
        for pid in await asyncio.to_thread(busiest_worker, scene.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return ()

    return happen


def busiest_worker(processes: ServerProcesses) -> list[int]:
    """Return the processes of the worker behind a gateway that computes most, its first one first.

    Raises:
        NotPlayedError: there is no such worker.
    """
    workers = [pid for pid in processes.family()[1:] if is_worker(pid)]
    busy: dict[int, float] = {}
    for pid in workers:
        family = ServerProcesses(pid).family()
        busy[pid] = sum(_cpu_s(each) for each in family)
    if not busy:
        raise NotPlayedError("no worker is behind the server")
    return ServerProcesses(max(busy, key=lambda pid: busy[pid])).family()


def is_worker(pid: int) -> bool:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(word in command for word in WORKERS)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- What surrounds a server ---


@contextlib.contextmanager
def beside_neighbour(box: Container) -> Iterator[None]:
    box.group.limit(NEIGHBOUR_LIMIT_BYTES)
    with neighbour(box.group, NEIGHBOUR_BYTES, NEIGHBOUR_PAUSE_S):
        yield


@contextlib.contextmanager
def in_one_memory(box: Container) -> Iterator[None]:
    box.group.limit(ONE_LIMIT_BYTES)
    yield


CRASH_LOOP = "crash-loop"
"""Name of the case whose server is killed and started many times."""

CASES: Mapping[str, Case] = {
    "full-context": Case(
        "a prompt fills the context", of_requests(requests.full_context), "vllm#52871"
    ),
    "logprobs": Case(
        "log-probabilities of a long prompt", of_requests(requests.prompt_logprobs), "vllm#14239"
    ),
    "adapters": Case(
        "a long prompt to a LoRA adapter",
        of_requests(adapters),
        "vllm#15039",
        setting="adapter",
    ),
    "images": Case("four images of 8192 x 8192", of_requests(requests.images), "vllm#48469"),
    "neighbour": Case(
        "a neighbour takes and frees memory during the start",
        alone(requests.full_context),
        "vllm#56830",
        surround=beside_neighbour,
        is_alone=True,
    ),
    "one-memory": Case(
        "one memory for host and device, and no sizes set",
        alone(requests.full_context),
        "vllm#46307, #56824",
        setting="no sizes",
        surround=in_one_memory,
        is_alone=True,
    ),
    "thrash": Case(
        "24 long answers, three times what the KV cache holds",
        alone(requests.long_answers),
        "vllm#25538, vllm-ascend#16315",
        setting="small pool",
    ),
    "kv-full": Case(
        "24 prompts, four times what the KV cache holds",
        alone(full_pool),
        "sglang#14972",
        setting="small pool",
    ),
    "unique": Case(
        "120 prompts that no cache has seen",
        of_requests(requests.unique_prompts),
        "llama.cpp#23181",
    ),
    "too-long": Case(
        "a prompt twice as long as the context", of_requests(requests.too_long), "ollama#16830"
    ),
    "choices": Case("64 answers to a long prompt", of_requests(requests.choices)),
    "schema": Case("a JSON schema of 400 levels", of_requests(requests.deep_schema)),
    "long-answers": Case("24 long answers at once", of_requests(requests.long_answers)),
    "crowd": Case("sixty long requests at once", of_requests(crowd)),
    "oom": Case(
        "the kernel kills the process that computes, as memory is full",
        oom,
        "kserve#6259",
        is_alone=True,
    ),
    "kill": Case("the process that computes gets SIGKILL", kill, is_alone=True),
    "hang": Case("that process hangs (SIGSTOP)", hang, is_alone=True),
    CRASH_LOOP: Case(
        "ten times all processes get SIGKILL",
        kill,
        "vllm#54002, #57303",
        setting="two ranks",
        is_alone=True,
    ),
    "worker-dies": Case(
        "one of two workers gets SIGKILL",
        to_worker(signal.SIGKILL),
        is_alone=True,
        is_for_gateways=True,
    ),
    "worker-hangs": Case(
        "one of two workers gets SIGSTOP",
        to_worker(signal.SIGSTOP),
        is_alone=True,
        is_for_gateways=True,
    ),
}
