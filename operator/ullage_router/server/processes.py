"""Several router processes behind the same ports, with the ports and certificates that they share.
The parent serves nothing and keeps its children running.

Each child is a whole router with its own connections to the engines. All listen on the same ports
with SO_REUSEPORT, and the kernel distributes connections over them. Bounds of the configuration for
the router as a whole are divided among them; they share tenants' quotas (`shared_quota.py`) and the
answers by `Idempotency-Key` (`pipeline/shared_answers.py`).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec

from ullage_common.config.router import RouterConfig, TLSSection
from ullage_common.process import addresses
from ullage_common.process.stacks import dump_loop_on_signal
from ullage_common.wire.channels import open_channel
from ullage_common.wire.tls import Certificates


class CannotListen(Exception):
    """A port is taken or not allowed; the message names it."""


def listen(
    host: str | None, port: int, is_shared: bool = False, name: str = "http"
) -> socket.socket:
    """Return a listening socket.

    Args:
        host: None: every address.
        is_shared: others of the same user may listen on the port too (SO_REUSEPORT).
        name: of the section of the configuration, for the error.

    Raises:
        CannotListen: the port cannot be used.
    """
    try:
        return addresses.listen(host, port, is_shared=is_shared)
    except OSError as error:
        raise _cannot(name, host, port, error) from error


def reserve(name: str, host: str | None, port: int) -> socket.socket:
    """Return a socket that holds a port for processes that share it, and takes no connection.

    Raises:
        CannotListen: the port cannot be used.
    """
    if port:  # a program that does not share it must be noticed here and not by the children
        listen(host, port, name=name).close()
    try:
        return addresses.hold(host, port)
    except OSError as error:
        raise _cannot(name, host, port, error) from error


def _cannot(name: str, host: str | None, port: int, error: OSError) -> CannotListen:
    address = addresses.joined(addresses.host_of(host), port)
    return CannotListen(f"{name}: {address}: {error.strerror}; choose another port")


FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STABLE_S = 10.0
"""A child that lived this long starts again without delay."""
STOP_MARGIN_S = 5.0
FOLDER_PREFIX = "ullage-router-"
UNUSABLE = 2
"""Exit status of a child that cannot use its configuration: trying again would not help."""

log = logging.getLogger(__name__)


class ProcessSlot(msgspec.Struct, frozen=True, kw_only=True):
    """What a child gets from its parent."""

    index: int
    http_port: int
    grpc_port: int
    metrics_port: int
    probes_port: int
    folder: str
    """Folder in which each child has a socket that serves its metrics to the others, and which has
    the tenants' quotas and answers by key."""


def config_of(config: RouterConfig, place: ProcessSlot) -> RouterConfig:
    """A child's configuration: the ports that were chosen and its part of what is bounded."""
    replace = msgspec.structs.replace
    count = config.processes
    queue = config.routing.queue
    queue = replace(
        queue,
        max_requests=-(-queue.max_requests // count),
        max_bytes=queue.max_bytes // count,
        max_prompt_bytes=queue.max_prompt_bytes // count,
    )
    wake = config.routing.wake
    wake = replace(
        wake, max_requests=-(-wake.max_requests // count), max_bytes=wake.max_bytes // count
    )
    return replace(
        config,
        http=replace(config.http, port=place.http_port),
        grpc=replace(config.grpc, port=place.grpc_port),
        metrics=replace(config.metrics, port=place.metrics_port),
        probes=config.probes and replace(config.probes, port=place.probes_port),
        routing=replace(config.routing, queue=queue, wake=wake),
    )


@dataclass(slots=True)
class Ports:
    """Sockets that hold the ports while no child listens; they take no connection themselves."""

    http: socket.socket
    grpc: socket.socket
    metrics: socket.socket
    probes: socket.socket | None

    def place(self, index: int, folder: str) -> ProcessSlot:
        return ProcessSlot(
            index=index,
            http_port=_port(self.http),
            grpc_port=_port(self.grpc),
            metrics_port=_port(self.metrics),
            probes_port=_port(self.probes) if self.probes else 0,
            folder=folder,
        )


@contextlib.contextmanager
def reserved(config: RouterConfig) -> Iterator[Ports]:
    """Yield the configured ports, or free ones where they are 0.

    Raises:
        CannotListen: another program has one of them.
    """
    with contextlib.ExitStack() as stack:

        def hold(name: str, host: str | None, port: int) -> socket.socket:
            return stack.enter_context(reserve(name, host, port))

        yield Ports(
            hold("http", config.http.host, config.http.port),
            hold("grpc", config.grpc.host, config.grpc.port),
            hold("metrics", config.metrics.host, config.metrics.port),
            hold("probes", config.probes.host, config.probes.port) if config.probes else None,
        )


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """The folder of one router's processes within the block. What routers left that were killed,
    whose locks are free, is removed: it has tenants' answers."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(old):
            shutil.rmtree(old)
    new = Path(tempfile.mkdtemp(prefix="ullage-"))
    with _locked(new):
        # Not before under the name by which others find it, and remove it where it has no lock.
        folder = new.rename(new.with_name(FOLDER_PREFIX + new.name.removeprefix("ullage-")))
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raise OSError where another process has the lock of a folder, or it is another user's."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


class Supervisor:
    """Keeps one child a place running until it is asked to stop.

    Args:
        config_path: what every child reads.
        config: the same, read.
    """

    def __init__(self, config_path: Path, config: RouterConfig) -> None:
        self._config_path = config_path
        self._config = config
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM and return the exit status.

        Raises:
            CannotListen: a port cannot be used.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        dump_loop_on_signal()  # of this process; each of the others has its own
        with (
            reserved(self._config) as ports,
            shared_folder() as folder,
        ):
            keeping = [
                asyncio.create_task(self._keep(ports.place(index, folder)))
                for index in range(self._config.processes)
            ]
            for task in keeping:  # a bug in one must not leave a place empty unseen
                task.add_done_callback(lambda _: self._stopping.set())
            await self._stopping.wait()
            await self._stop()
            await asyncio.gather(*keeping)
        return self._status

    async def _keep(self, place: ProcessSlot) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_child(place)
            if self._stopping.is_set():
                return
            extra = {"child": place.index, "status": status}
            if status == UNUSABLE:
                log.error("a process cannot be started", extra=extra)
                self._status = UNUSABLE
                self._stopping.set()
                return
            if time.monotonic() - started >= STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            log.error("a process died", extra={**extra, "restart_in_s": backoff_s})
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_child(self, place: ProcessSlot) -> int:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ullage_router.main",
            "--config",
            str(self._config_path),
            "--place",
            msgspec.json.encode(place).decode(),
            # A child ends when it is closed: its parent is no more.
            stdin=asyncio.subprocess.PIPE,
        )
        self._children[place.index] = child
        log.info("process started", extra={"child": place.index, "child_pid": child.pid})
        try:
            if self._stopping.is_set():
                child.terminate()
            return await child.wait()
        finally:
            del self._children[place.index]

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _stop(self) -> None:
        """Let every child drain, and end those that do not."""
        for child in self._children.values():
            _send(child, signal.SIGTERM)
        limit_s = longest_request_s(self._config) + STOP_MARGIN_S
        ends = [asyncio.create_task(child.wait()) for child in self._children.values()]
        if ends:
            await asyncio.wait(ends, timeout=limit_s)
        for child in self._children.values():
            _send(child, signal.SIGKILL)


def longest_request_s(config: RouterConfig) -> float:
    """Return the seconds until an accepted request has ended: held for a pool that sleeps, then
    answered."""
    held_s = config.routing.wake.timeout if any(pool.sleeps for pool in config.pools) else 0.0
    return held_s + config.limits.total_timeout


def watch_parent(stop: asyncio.Event) -> None:
    """Set `stop` when the parent has ended, however it did."""
    loop = asyncio.get_running_loop()

    def is_over() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), is_over)


def _send(child: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _port(held: socket.socket) -> int:
    return int(held.getsockname()[1])


class RouterTLS:
    """The router's own certificates and those towards engines, where they are configured, and the
    state of all that the router uses.

    Args:
        on_engines_change: called when channels to engines must be opened anew.
    """

    def __init__(self, section: TLSSection, on_engines_change: Callable[[], None]) -> None:
        self._server_name = section.engines.server_name if section.engines else ""
        self.accepts_plaintext = bool(section.engines and section.engines.accept_plaintext)
        """Whether engines may speak plaintext beside TLS."""
        self.server: Certificates | None = None
        self.engines: Certificates | None = None
        self._others: dict[str, Certificates] = {}
        if router := section.router:
            ca = Path(router.client_ca_dir) if router.client_ca_dir else None
            self.server = Certificates(Path(router.dir), ca)
        if engines := section.engines:
            folder = Path(engines.dir)
            self.engines = Certificates(folder, folder, on_engines_change)

    def add(self, certificates: Mapping[str, Certificates]) -> None:
        """Show the state of others, by name, which their owner starts and closes."""
        self._others.update(certificates)

    async def start(self) -> None:
        """Raise ConfigError when a certificate cannot be used."""
        for certificates in self._own().values():
            await certificates.start()

    async def close(self) -> None:
        for certificates in self._own().values():
            await certificates.close()

    @property
    def dialer(self) -> Callable[[str], grpc.aio.Channel] | None:
        """Opens channels to engines; None where they are in plaintext."""
        return self._dial if self.engines else None

    def _dial(self, address: str) -> grpc.aio.Channel:
        assert self.engines
        return open_channel(address, self.engines.channel_credentials(), self._server_name)

    @property
    def num_problems(self) -> int:
        return sum(bool(c.state()["problem"]) for c in self._all().values())

    @property
    def expiry(self) -> float:
        """Unix time at which the first certificate ends; 0 where there is none."""
        ends = [c.material.expires.timestamp() for c in self._all().values()]
        return min(ends, default=0.0)

    def snapshot(self) -> dict[str, object]:
        """The part of /stats; empty without TLS."""
        states = {name: certificates.state() for name, certificates in self._all().items()}
        return {"tls": states} if states else {}

    def _all(self) -> dict[str, Certificates]:
        return self._own() | self._others

    def _own(self) -> dict[str, Certificates]:
        named = {"router": self.server, "engines": self.engines}
        return {name: certificates for name, certificates in named.items() if certificates}
