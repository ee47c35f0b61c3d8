"""Joins several nodes into a group that runs one engine, and stops them together.

Each follower keeps one connection to the leader while the group runs. On joining, it sends its
revision and its rank. Once all followers have joined, the leader sends Start, and every node starts
vLLM. A node that loses a connection stops its vLLM processes. The leader's server then restarts the
leader's worker, and the followers rejoin. TCP keep-alives detect a vanished node within 10 s.
"""

import argparse
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from ullage_common.config.engine import EngineConfig, GroupSection, follower_place
from ullage_common.process import logs
from ullage_common.process.addresses import listen
from ullage_common.process.config_file import ConfigError, read_file
from ullage_engine.model_loader.source import is_of_bucket, model_version, resolve_source
from ullage_engine.protocol.errors import GROUP_LOST, WeightsError, WorkerStartError
from ullage_engine.protocol.messages import Loading
from ullage_engine.server.worker_env import launch_env, vllm_env
from ullage_engine.vllm_worker.arguments import Node
from ullage_engine.vllm_worker.follower_health import FollowerHealth
from ullage_engine.worker.loop import Report

log = logging.getLogger("ullage.engine.group")

REVISION = "ULLAGE_GROUP_REVISION"
"""Environment variable that holds the pod's revision, the same for all pods of a group."""
LOADED_FD = "ULLAGE_LOADED_FD"
"""Environment variable that tells a compute process on which file descriptor to report.

The process writes a byte to the descriptor once the ranks of its node have loaded the model.
"""

KEEPALIVE = {
    socket.TCP_KEEPIDLE: 4,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
}
"""TCP keep-alive settings.

The settings are the seconds of idle time before the first probe, the seconds between probes, and
the number of unanswered probes after which the connection is closed.
"""

_LONGEST_MESSAGE = 4096
"""Maximum size of a message in bytes."""
_SEND_TIMEOUT_S = 5.0
_NEWS_S = 5.0
"""Seconds between a follower's heartbeats while it waits."""
_LOOK_S = 1.0
"""Seconds between a leader's progress reports while it waits for followers."""
_RETRY_S = 1.0
"""Seconds between a follower's attempts to join."""


class NodeJoin(msgspec.Struct, frozen=True, tag="Join"):
    """Request to join a leader. This is the only message that a follower sends."""

    revision: str
    rank: int
    """Index of the follower's node, from 1. The leader has index 0."""


class Start(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The leader's message that tells all followers to start vLLM."""

    rank_bytes: int
    """Device memory per rank on the leader, in bytes. It determines the number of adapter slots."""
    model_version: str = ""
    """Version of the leader's model files, or "" if the model does not come from a bucket."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The leader's message to a follower that cannot join now. The follower will retry."""

    reason: str


class NodeRoster:
    """The followers that have joined a leader."""

    def __init__(self, revision: str, num_nodes: int) -> None:
        self._revision = revision
        self._num_nodes = num_nodes
        self._joined: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks of the followers that have not joined yet."""
        return [rank for rank in range(1, self._num_nodes) if rank not in self._joined]

    def refusal(self, message: NodeJoin) -> str:
        """Return why a follower cannot join, or "" if it can."""
        if message.revision != self._revision:
            return f"the leader is of revision {self._revision!r}, and you of {message.revision!r}"
        if not 0 < message.rank < self._num_nodes:
            return f"rank {message.rank} is not one of 1 to {self._num_nodes - 1}"
        return ""

    def join(self, rank: int) -> None:
        self._joined.add(rank)

    def leave(self, rank: int) -> None:
        self._joined.discard(rank)


class NodeConnection:
    """One end of a connection between follower and leader. Each message is one line of JSON."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._buffer = b""
        peer.settimeout(_SEND_TIMEOUT_S)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Local address of this connection."""
        return _unmapped(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """Remote address of this connection."""
        return _unmapped(self._socket.getpeername()[0])

    def send(self, message: NodeJoin | Start | Refused) -> None:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> bytes | None:
        """Read the available data, and return a message if it is now complete.

        Returns:
            The message as JSON, or None while it is incomplete.

        Raises:
            OSError: the connection is lost, or the message is too long.
        """
        data = self._socket.recv(_LONGEST_MESSAGE)
        self._buffer += data
        if not data or len(self._buffer) > _LONGEST_MESSAGE:
            raise ConnectionError("the connection was closed")
        return self._buffer if self._buffer.endswith(b"\n") else None

    def close(self) -> None:
        self._socket.close()


def _unmapped(address: str) -> str:
    """Convert an IPv4-mapped IPv6 address to plain IPv4. Return other addresses unchanged."""
    return address.removeprefix("::ffff:")


# the leader -----------------------------------------------------------------------------------


class Leader:
    """Leads a group: waits until all followers have joined, then watches for lost followers."""

    def __init__(
        self, listener: socket.socket, revision: str, num_nodes: int, start: Start
    ) -> None:
        """Create a leader that sends `start` to all followers once they have joined."""
        self._listener = listener
        self._start = start
        self._roster = NodeRoster(revision, num_nodes)
        self._ranks: dict[int, NodeConnection] = {}

    def gather(self, on_wait: Callable[[list[int]], None]) -> str:
        """Wait until all followers have joined, then send them Start.

        Args:
            on_wait: called about once per second with the ranks that have not joined yet.

        Returns:
            The address at which followers reach this node.
        """
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ, None)
            on_wait(self._roster.missing)
            looked_at = time.monotonic()
            while self._roster.missing:
                for key, _ in selector.select(_LOOK_S):
                    self._on_event(selector, key.data)
                if time.monotonic() - looked_at >= _LOOK_S or not self._roster.missing:
                    looked_at = time.monotonic()
                    on_wait(self._roster.missing)
            joined = list(self._ranks.values())
            for key in list(selector.get_map().values()):
                if key.data is not None and key.data not in joined:
                    key.data.close()
        for connection in self._ranks.values():
            # A follower lost at this point is found by `watch`.
            _try_send(connection, self._start)
        return next(iter(self._ranks.values())).own_address

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """Start a thread that calls `on_lost` with the rank of the first follower to be lost."""

        def wait() -> None:
            with selectors.DefaultSelector() as selector:
                for rank, connection in self._ranks.items():
                    selector.register(connection, selectors.EVENT_READ, rank)
                # A follower sends nothing more, so its socket becomes readable only when it closes.
                key, _ = selector.select()[0]
            on_lost(key.data)

        threading.Thread(target=wait, name="followers", daemon=True).start()

    def close(self) -> None:
        """Close all connections, so that the followers stop their vLLM processes."""
        for connection in self._ranks.values():
            connection.close()

    def _on_event(
        self, selector: selectors.BaseSelector, connection: NodeConnection | None
    ) -> None:
        """Accept a new connection, or read from an existing one."""
        if connection is None:
            connection = NodeConnection(self._listener.accept()[0])
            selector.register(connection, selectors.EVENT_READ, connection)
            return
        if connection.fileno() < 0:  # closed: a newer connection replaced it
            return
        try:
            data = connection.receive()
            if data is not None:
                self._join(selector, connection, msgspec.json.decode(data, type=NodeJoin))
        except (OSError, msgspec.MsgspecError):
            self._drop(selector, connection)

    def _join(
        self, selector: selectors.BaseSelector, connection: NodeConnection, message: NodeJoin
    ) -> None:
        if refusal := self._roster.refusal(message):
            log.warning("refused a follower at %s: %s", connection.peer_address, refusal)
            _try_send(connection, Refused(refusal))
            self._drop(selector, connection)
            return
        former = self._ranks.get(message.rank)
        if former is not None and former is not connection:
            self._drop(selector, former)
        self._ranks[message.rank] = connection
        self._roster.join(message.rank)

    def _drop(self, selector: selectors.BaseSelector, connection: NodeConnection) -> None:
        for rank, joined in list(self._ranks.items()):
            if joined is connection:
                del self._ranks[rank]
                self._roster.leave(rank)
        selector.unregister(connection)
        connection.close()


def _try_send(connection: NodeConnection, message: Start | Refused) -> None:
    try:
        connection.send(message)
    except OSError:
        log.warning("a follower is gone before it could be answered")


def end_worker(rank: int) -> NoReturn:
    """Terminate this worker and this node's ranks, because follower `rank` has disconnected."""
    log.error("the connection to the follower of rank %d is lost; this worker ends", rank)
    # Exit at once: another thread of vLLM may be waiting for the lost rank. The server restarts the
    # worker.
    os._exit(GROUP_LOST)


def lead(group: GroupSection, report: Report, rank_bytes: int, model_version: str = "") -> Node:
    """Wait for all followers to join. From then on, this process exits if a follower is lost.

    Args:
        group: size and port of the group.
        report: called with the number of followers that have joined.
        rank_bytes: device memory per rank on this node, in bytes.
        model_version: version of the model's files, or "" if they do not come from a bucket.

    Returns:
        This node's place in the group.

    Raises:
        WorkerStartError: the port is in use.
    """
    try:
        listener = listen(None, group.join_port)
    except OSError as error:
        raise WorkerStartError(
            f"group.join_port: cannot listen at {group.join_port} ({error.strerror}); set another"
        ) from error
    start = Start(rank_bytes=rank_bytes, model_version=model_version)
    leader = Leader(listener, os.environ.get(REVISION, ""), group.nodes, start)
    former: list[int] = []

    def on_wait(missing: list[int]) -> None:
        nonlocal former
        if missing != former:
            log.info("waiting for the followers of ranks %s", missing)
            former = missing
        total = group.nodes - 1
        report(Loading(stage="followers", done_bytes=total - len(missing), total_bytes=total))

    address = leader.gather(on_wait)
    leader.watch(end_worker)
    return Node(rank=0, leader=address)


# a follower -----------------------------------------------------------------------------------


class Follower:
    """Repeatedly joins the leader and runs this node's ranks, until SIGTERM or SIGINT.

    If the signal arrives while the ranks run, the follower continues until the leader exits.
    """

    def __init__(
        self,
        leader: tuple[str, int],
        join: NodeJoin,
        command: Callable[[str, Start], Sequence[str]],
        environment: Mapping[str, str],
        health: FollowerHealth,
        fetch: Callable[[], str] | None = None,
    ) -> None:
        """Create a follower that has not joined yet.

        Args:
            leader: host name and join port of the leader.
            join: join request to send to the leader.
            command: returns the worker's command line, given the leader's address and Start
                message.
            environment: environment variables for the worker, in addition to those of this process.
            health: answers the kubelet's probes.
            fetch: downloads a model from a bucket and returns its version. None if the model does
                not come from a bucket.
        """
        self._leader = leader
        self._message = join
        self._command = command
        self._environment = environment
        self._health = health
        self._fetch = fetch
        self._is_computing = False
        self._is_ending = False
        self._refusal = ""

    def run(self) -> None:
        """Repeatedly join the leader and run this node's ranks, until a signal arrives.

        Raises:
            WeightsError: the model cannot be downloaded, or the leader uses another version of it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        version = self._fetched(self._fetch) if self._fetch else ""
        while not self._is_ending:
            connection, start = self._join()
            try:
                _check_version(version, start.model_version)
                self._compute(connection, start)
            finally:
                connection.close()
            if not self._is_ending:
                time.sleep(_RETRY_S)

    def _fetched(self, fetch: Callable[[], str]) -> str:
        """Download the model while recording heartbeats, and return the model's version."""
        version: Future[str] = Future()

        def run() -> None:
            try:
                version.set_result(fetch())
            except BaseException as error:
                version.set_exception(error)

        threading.Thread(target=run, name="fetch", daemon=True).start()
        while not wait([version], _NEWS_S).done:
            self._health.on_look()
        return version.result()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_computing:
            raise SystemExit(0)
        log.info("asked to end: this node goes on until its leader ends")
        self._is_ending = True

    def _join(self) -> tuple[NodeConnection, Start]:
        """Join the leader. Return the connection and the leader's Start message."""
        log.info("looking for the leader at %s:%d", *self._leader)
        for connection in self._attempts():
            try:
                connection.send(self._message)
                answer = _wait_for_answer(connection, self._health)
            except (OSError, msgspec.MsgspecError):
                connection.close()
                continue
            if isinstance(answer, Start):
                return connection, answer
            connection.close()
            if answer.reason != self._refusal:
                self._refusal = answer.reason
                log.warning("the leader refuses this node: %s; trying again", answer.reason)
        raise AssertionError("attempts do not end")

    def _attempts(self) -> Iterator[NodeConnection]:
        while True:
            self._health.on_look()
            try:
                peer = socket.create_connection(self._leader, timeout=_SEND_TIMEOUT_S)
            except OSError:  # the leader's name may not resolve yet
                time.sleep(_RETRY_S)
                continue
            yield NodeConnection(peer)
            time.sleep(_RETRY_S)

    def _compute(self, connection: NodeConnection, start: Start) -> None:
        """Run vLLM until it exits or the connection to the leader is lost."""
        self._is_computing = True
        log.info("all nodes have joined; starting vLLM")
        command = self._command(connection.peer_address, start)
        loaded, on_loaded = os.pipe()
        environment = {**os.environ, **self._environment, LOADED_FD: str(on_loaded)}
        process = subprocess.Popen(command, env=environment, pass_fds=(on_loaded,))
        os.close(on_loaded)
        try:
            ended = os.pidfd_open(process.pid)
            try:
                is_lost = self._watch(connection.fileno(), ended, loaded)
            finally:
                os.close(ended)
            if is_lost:
                log.warning("the connection to the leader is lost")
            else:
                log.error("vLLM has ended with status %s", process.wait())
        finally:
            self._health.is_computing = False
            os.close(loaded)
            process.kill()
            process.wait()
            self._is_computing = False

    def _watch(self, connection: int, ended: int, loaded: int) -> bool:
        """Wait until vLLM exits or the leader is lost. Return whether the leader was lost."""
        watched = [connection, ended, loaded]
        while True:
            self._health.on_look()
            ready, _, _ = select.select(watched, [], [], _NEWS_S)
            if ended in ready or connection in ready:
                return ended not in ready
            if loaded in ready:  # a byte, or end of file once no process can write one
                watched.remove(loaded)
                self._health.is_computing = bool(os.read(loaded, 1))


def _check_version(own: str, leaders: str) -> None:
    """Check that this node loads the same model version as its leader.

    Raises:
        WeightsError: the versions differ.
    """
    if own != leaders:
        raise WeightsError(
            f"model.source: the leader has the files {leaders!r}, and this node {own!r}: the "
            "bucket has changed between their starts; this node ends, and looks for newer files "
            "when it starts again; if that stays, delete the leader's pod"
        )


def announce_loaded() -> None:
    """Tell the follower that started this process that the model is loaded."""
    if LOADED_FD in os.environ:
        os.write(int(os.environ[LOADED_FD]), b"1")


def _wait_for_answer(connection: NodeConnection, health: FollowerHealth) -> Start | Refused:
    """Wait for the leader's reply while recording heartbeats, and return the reply.

    Raises:
        OSError: the connection is lost.
        msgspec.MsgspecError: the message is not a valid reply.
    """
    while True:
        health.on_look()
        if not select.select([connection], [], [], _NEWS_S)[0]:
            continue
        if (data := connection.receive()) is not None:
            return msgspec.json.decode(data, type=Start | Refused)


def follow(arguments: Sequence[str]) -> int:
    """Run this node as a follower of a multi-node engine, until a signal or an error.

    Returns:
        The exit status: 0 after a signal, 1 if the model cannot be loaded or differs from the
        leader's, 2 if the configuration is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.vllm_worker --follow",
        description="Compute with vLLM as a further node of an ullage-engine on another one.",
    )
    parser.add_argument("--config", type=Path, required=True, help="the engine's configuration")
    parser.add_argument("--index", type=int, required=True, help="which follower of all, from 0")
    parser.add_argument("--leader", required=True, help="the leader's name; {group} is its index")
    options = parser.parse_args(arguments)
    try:
        config = read_file(options.config, EngineConfig)
        if config.group.nodes < 2 or options.index < 0:
            raise ConfigError("group.nodes is 1, so nobody follows; set it to 2 or more")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    leader, rank = follower_place(options.index, config.group.nodes)
    health = FollowerHealth()
    if config.server.probe_port is not None:
        health.serve(listen(None, config.server.probe_port))
    logs.configure(config.server.log_level, fields={"node": rank})

    host = options.leader.replace("{group}", str(leader))
    command = [sys.executable, "-m", "ullage_engine.vllm_worker", "--node", str(rank)]
    command += ["--config", str(options.config)]
    follower = Follower(
        (host, config.group.join_port),
        NodeJoin(os.environ.get(REVISION, ""), rank),
        lambda address, start: [
            *command,
            *("--leader", address, "--rank-bytes", str(start.rank_bytes)),
        ],
        launch_env(config, vllm_env),
        health,
        partial(_fetch_model, config.model.source) if is_of_bucket(config.model.source) else None,
    )
    try:
        follower.run()
    except WeightsError as error:
        log.error("%s", error)
        return 1
    return 0


def _fetch_model(source: str) -> str:
    resolve_source(source)
    return model_version(source)
