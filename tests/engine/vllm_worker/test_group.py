"""Leaders and followers find each other and end together: real sockets and processes, and a
program in place of vLLM that says that it runs, and runs until it is ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from ullage_testing.ports import free_port

from ullage_common.config.engine import (
    EngineConfig,
    GroupSection,
    ModelSection,
    ParallelismSection,
)
from ullage_common.process.addresses import listen
from ullage_engine import main as engine_main
from ullage_engine.protocol.errors import GROUP_LOST, WorkerStartError
from ullage_engine.protocol.messages import Loading
from ullage_engine.server.worker_env import launch_env, vllm_env
from ullage_engine.vllm_worker.__main__ import main
from ullage_engine.vllm_worker.follower_health import HUNG_AFTER_S, FollowerHealth
from ullage_engine.vllm_worker.group import Leader, NodeConnection, NodeRoster, Start, lead

PATIENCE_S = 60.0

LEADER = """
import sys, time
from ullage_common.process.addresses import listen
from ullage_engine.vllm_worker.group import Leader, Start, end_worker
start = Start(rank_bytes=7 << 30)
leader = Leader(listen(None, int(sys.argv[1])), "r1", int(sys.argv[2]), start)
print(leader.gather(lambda missing: print(missing, flush=True)), flush=True)
leader.watch(end_worker)
time.sleep(3600)
"""
FOLLOWER = """
import sys
from ullage_common.process.addresses import listen
from ullage_engine.vllm_worker.follower_health import FollowerHealth
from ullage_engine.vllm_worker.group import Follower, NodeJoin
assert "torch" not in sys.modules  # seconds, and memory that each follower would hold
port, health_port, revision, rank, *compute = sys.argv[1:]
health = FollowerHealth()
health.serve(listen(None, int(health_port)))
Follower(
    ("127.0.0.1", int(port)),
    NodeJoin(revision, int(rank)),
    lambda at, start: [*compute, at, str(start.rank_bytes)],
    {"SET": "1"},
    health,
).run()
"""
COMPUTE = """
import os, pathlib, sys, time
from ullage_engine.vllm_worker.group import announce_loaded
folder, rank, leader, rank_bytes = sys.argv[1:]
assert os.environ["SET"] == "1"
(pathlib.Path(folder) / f"{os.getpid()}.computes").write_text(f"{rank} {leader} {rank_bytes}")
while not (pathlib.Path(folder) / "loaded").exists():
    time.sleep(0.01)
announce_loaded()
time.sleep(3600)
"""


def wait_for(is_so: Callable[[], object]) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class Group:
    """Processes of leaders and followers on one port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.health_ports: dict[int, int] = {}
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def lead(self, num_nodes: int = 3) -> subprocess.Popen[str]:
        return self._run(LEADER, str(self.port), str(num_nodes))

    def follow(self, rank: int, revision: str = "r1") -> subprocess.Popen[str]:
        compute = (sys.executable, "-c", COMPUTE, str(self._folder), str(rank))
        self.health_ports[rank] = free_port()
        ports = (str(self.port), str(self.health_ports[rank]))
        return self._run(FOLLOWER, *ports, revision, str(rank), *compute)

    def load(self) -> None:
        """Let the processes that compute load the model."""
        (self._folder / "loaded").touch()

    def health(self, rank: int, path: str) -> int:
        """The status that a follower's kubelet gets; 0 where nothing answers."""
        url = f"http://127.0.0.1:{self.health_ports[rank]}{path}"
        try:
            return httpx.get(url, timeout=5).status_code
        except httpx.TransportError:
            return 0

    def computing(self) -> dict[int, int]:
        """The processes that compute, by their ranks."""
        found = {}
        for path in self._folder.glob("*.computes"):
            pid = int(path.stem)
            words = path.read_text().split()
            if len(words) == 3 and psutil.pid_exists(pid):
                assert words[1:] == ["127.0.0.1", str(7 << 30)]
                found[int(words[0])] = pid
        return found

    def wait_computing(self, *ranks: int) -> dict[int, int]:
        wait_for(lambda: set(self.computing()) == set(ranks))
        return self.computing()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            with process:  # what it started may still have its output open
                pass
        for pid in self.computing().values():
            os.kill(pid, signal.SIGKILL)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.end()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of what a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_nodes_compute_when_all_are_there_and_end_with_their_leader(group: Group) -> None:
    leader = group.lead()
    assert said(leader) == "[1, 2]"
    followers = [group.follow(1)]
    while (line := said(leader)) == "[1, 2]":
        pass
    assert line == "[2]"
    assert not group.computing()
    followers.append(group.follow(2))
    former = group.wait_computing(1, 2)
    while (line := said(leader)) == "[2]":
        pass
    assert (line, said(leader)) == ("[]", "127.0.0.1")
    leader.kill()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in former.values()))
    # The same followers join the next leader.
    group.lead()
    again = group.wait_computing(1, 2)
    assert not set(again.values()) & set(former.values())
    assert all(follower.poll() is None for follower in followers)


def test_a_follower_is_ready_while_its_group_computes_and_live_while_it_waits(group: Group) -> None:
    leader = group.lead(2)
    follower = group.follow(1)
    group.wait_computing(1)
    wait_for(lambda: group.health(1, "/healthz") == 200)
    assert group.health(1, "/readyz") == 503, "the model is not loaded yet"
    group.load()
    wait_for(lambda: group.health(1, "/readyz") == 200)
    leader.kill()
    wait_for(lambda: group.health(1, "/readyz") == 503)
    assert group.health(1, "/healthz") == 200, "it waits for the next leader"
    assert group.health(1, "/other") == 404
    group.lead(2)
    wait_for(lambda: group.health(1, "/readyz") == 200)
    follower.send_signal(signal.SIGSTOP)
    assert group.health(1, "/healthz") == 0


def test_a_follower_that_hangs_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    health = FollowerHealth()
    now = time.monotonic()
    health.is_computing = True
    assert (health.status("/healthz"), health.status("/readyz")) == (200, 200)
    monkeypatch.setattr(time, "monotonic", lambda: now + HUNG_AFTER_S + 1)
    assert (health.status("/healthz"), health.status("/readyz")) == (503, 503)
    health.on_look()
    assert health.status("/readyz") == 200


@pytest.mark.parametrize("ends", ["follower", "vllm"])
def test_a_leader_ends_with_its_first_follower(group: Group, ends: str) -> None:
    followers = {rank: group.follow(rank) for rank in (1, 2)}
    leader = group.lead()
    former = group.wait_computing(1, 2)
    os.kill(followers[1].pid if ends == "follower" else former[1], signal.SIGKILL)
    assert leader.wait(PATIENCE_S) == GROUP_LOST
    wait_for(lambda: not psutil.pid_exists(former[2]))


def test_a_follower_without_a_leader_ends_when_it_is_asked_to(group: Group) -> None:
    alone = group.follow(1)
    # When it looks for its leader it takes signals.
    with socket.create_server(("127.0.0.1", group.port)) as server:
        server.settimeout(PATIENCE_S)
        peer, _ = server.accept()
        with peer:
            assert peer.recv(4096)
            alone.terminate()
            assert alone.wait(PATIENCE_S) == 0


def test_a_follower_that_computes_ends_when_its_leader_does(group: Group) -> None:
    follower = group.follow(1)
    leader = group.lead(num_nodes=2)
    pids = group.wait_computing(1)
    follower.terminate()
    # It has taken the signal when it is neither pending nor being handled.
    wait_for(lambda: not _pending(follower.pid))
    assert psutil.pid_exists(pids[1])
    assert leader.poll() is None
    leader.kill()
    assert follower.wait(PATIENCE_S) == 0
    assert not psutil.pid_exists(pids[1])


def _pending(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(line.split()[1].strip("0") for line in lines if line[:7] in ("SigPnd:", "ShdPnd:"))


class Gathering:
    """A leader of three nodes in this process."""

    def __init__(self) -> None:
        listener = listen(None, 0)
        self.port = listener.getsockname()[1]
        self.leader = Leader(listener, "r1", 3, Start(rank_bytes=7))
        self.missing: list[list[int]] = []
        self.address = ""
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        self.address = self.leader.gather(self.missing.append)

    def connect(self, message: bytes) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        peer.sendall(message)
        return peer

    def join(self, rank: int, revision: str = "r1") -> socket.socket:
        return self.connect(
            b'{"type":"Join","revision":"%s","rank":%d}\n' % (revision.encode(), rank)
        )

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_only_ranks_of_the_leaders_revision_are_counted() -> None:
    gathering = Gathering()
    with (
        gathering.join(1, "r2") as other,
        gathering.join(3) as outside,
        gathering.connect(b"GET / HTTP/1.1\r\n\r\n") as stranger,
        gathering.connect(b"x" * 5000) as endless,
        gathering.connect(b"{") as silent,
    ):
        assert b"the leader is of revision 'r1', and you of 'r2'" in other.recv(4096)
        assert b"rank 3 is not one of 1 to 2" in outside.recv(4096)
        for refused in (other, outside, stranger, endless):
            assert _is_closed(refused)
        # The later one of a rank counts, whose node has been started again.
        with gathering.join(1) as former:
            wait_for(lambda: [2] in gathering.missing)
            with gathering.join(1) as one:
                assert _is_closed(former)
                with gathering.join(2) as two:
                    gathering.wait()
                    assert one.recv(4096) == two.recv(4096) == b'{"type":"Start","rank_bytes":7}\n'
                    assert gathering.address == "127.0.0.1"
                    lost: list[int] = []
                    gathering.leader.watch(lost.append)
                    two.close()
                    wait_for(lambda: lost)
                    assert lost == [2]
        assert _is_closed(silent)
    gathering.leader.close()


def _is_closed(peer: socket.socket) -> bool:
    try:
        return not peer.recv(4096)
    except ConnectionResetError:  # with data that nobody read
        return True


def test_a_follower_that_leaves_before_the_start_is_missing_again() -> None:
    roster = NodeRoster("r1", 4)
    roster.join(1)
    roster.join(3)
    assert roster.missing == [2]
    roster.leave(3)
    assert roster.missing == [2, 3]


def test_the_kernel_ends_the_connection_to_a_node_that_has_vanished_in_ten_seconds() -> None:
    with listen(None, 0) as listener:
        peer = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        connection = NodeConnection(peer)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            peer.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count == 10
        connection.close()


def test_a_worker_that_leads_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULLAGE_GROUP_REVISION", "r1")
    port = free_port()
    loading: list[Loading] = []
    peers: list[socket.socket] = []

    def report(message: Loading) -> None:
        loading.append(message)
        if not peers:
            peers.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            peers[0].sendall(b'{"type":"Join","revision":"r1","rank":1}\n')

    with pytest.MonkeyPatch.context() as patch:
        # The test's own process is not to end with its follower.
        patch.setattr(Leader, "watch", lambda leader, _: leader.close())
        node = lead(GroupSection(nodes=2, join_port=port), report, 7, "models/llama-1")
    told = {"type": "Start", "rank_bytes": 7, "model_version": "models/llama-1"}
    assert json.loads(peers[0].recv(4096)) == told
    assert (node.rank, node.leader) == (0, "127.0.0.1")
    assert {(each.stage, each.total_bytes) for each in loading} == {("followers", 1)}
    assert [each.done_bytes for each in loading][-1] == 1
    peers[0].close()


def test_a_taken_port_is_named() -> None:
    with listen(None, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorkerStartError, match=rf"^group\.join_port: cannot listen at {port} "):
            lead(GroupSection(nodes=2, join_port=port), lambda _: None, 7)


def test_nobody_follows_an_engine_on_one_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("model: {source: file:///m, name: m}")
    given = ["--follow", "--config", str(config), "--index", "0", "--leader", "leader-{group}"]
    assert main(given) == 2
    assert capsys.readouterr().err.startswith("error: group.nodes is 1, so nobody follows")


def test_the_native_engine_refuses_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(
        "{engine: native, gpus: 2, group: {nodes: 2}, model: {source: file:///m, name: m}}"
    )
    assert engine_main.main(["--config", str(config)]) == 2
    reason = "group.nodes: the native engine computes on one node; set nodes of the pool to 1, or"
    assert f"{reason} set engine: vllm (spec.engine: VLLM)" in capsys.readouterr().err


def test_several_nodes_do_not_talk_on_the_loopback_interface() -> None:
    def environment(nodes: int, **nccl: str) -> dict[str, str]:
        config = EngineConfig(
            model=ModelSection(source="file:///m", name="m"),
            gpus=4,
            parallelism=ParallelismSection(tensor=4, nccl=nccl),
            group=GroupSection(nodes=nodes),
        )
        return launch_env(config, vllm_env)

    assert environment(1)["NCCL_SOCKET_IFNAME"] == "lo"
    alone = environment(1)
    several = environment(2, GLOO_SOCKET_IFNAME="eth1")
    assert "NCCL_SOCKET_IFNAME" not in several
    assert several["GLOO_SOCKET_IFNAME"] == "eth1"
    # Each node's cores are those of its own ranks.
    assert int(several["OMP_NUM_THREADS"]) >= int(alone["OMP_NUM_THREADS"])
