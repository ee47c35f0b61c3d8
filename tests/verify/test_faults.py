"""Faults hit real processes, and leave everything else as it was."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ullage_verify import faults as faults_module
from ullage_verify import memory_limit, neighbour
from ullage_verify.faults import (
    admin_faults,
    clock_faults,
    disk_faults,
    node_faults,
    pod_faults,
    process_faults,
)
from ullage_verify.partition import internal_ports
from ullage_verify.processes import ServerProcesses
from ullage_verify.shared_files import SharedFiles
from ullage_verify.target import TargetError

SERVER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""
WORKER = """
import time
held = b"1" * (120 << 20)
print("up", flush=True)
while True:
    sum(range(10_000))
    time.sleep(0.001)
"""
FRONT = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
command = [sys.executable, "-c", sys.argv[1], str(listener.getsockname()[1])]
back = subprocess.Popen(command)
connection, _ = listener.accept()
outer = socket.create_server(("127.0.0.1", 0))
print(outer.getsockname()[1], flush=True)
client, _ = outer.accept()
while True:
    connection.sendall(client.recv(1))
    client.sendall(connection.recv(1))
"""
"""Program that sends each byte of its client to another process, and the answer back."""
BACK = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while byte := connection.recv(1):
    connection.sendall(byte)
"""
PARTITION_S = 0.5
FULL_S = 0.3
IS_ROOT = os.geteuid() == 0
HAS_GROUPS = os.geteuid() == 0 and any(
    (root / "cgroup.procs").exists() for root in memory_limit.ROOTS
)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Yield the ids of a server's first process and of its worker."""
    command = [sys.executable, "-c", SERVER, WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        worker = int(process.stdout.readline())
        try:
            yield process.pid, worker
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def state(pid: int) -> str:
    """Return a process's state letter, Z if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, letter: str) -> None:
    until = time.monotonic() + 30
    while state(pid) != letter:
        assert time.monotonic() < until, state(pid)
        time.sleep(0.01)


def test_the_worker_is_the_busiest_process(server: tuple[int, int]) -> None:
    first, worker = server
    processes = ServerProcesses(first)
    assert sorted(processes.family()) == sorted(server)
    assert processes.busiest() == worker
    assert processes.resident_bytes() > 120 << 20


def test_signals(server: tuple[int, int]) -> None:
    first, worker = server
    with process_faults(first) as faults:
        asyncio.run(_happen(faults["SIGSTOP of the busiest process"]))
        wait_for(worker, "T")
        asyncio.run(_happen(faults["SIGKILL of the busiest process"]))
        wait_for(worker, "Z")
    assert state(first) in "SR"


def test_a_stopped_process_continues_at_the_end(server: tuple[int, int]) -> None:
    first, worker = server
    with pytest.raises(KeyboardInterrupt), process_faults(first) as faults:
        asyncio.run(_happen(faults["SIGSTOP of the busiest process"]))
        wait_for(worker, "T")
        raise KeyboardInterrupt
    assert state(worker) in "SR"


async def _happen(fault: object) -> None:
    assert callable(fault)
    await fault()


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_memory_is_really_exhausted_and_the_group_removed(server: tuple[int, int]) -> None:
    first, worker = server
    group = Path(f"/proc/{first}/cgroup").read_text()
    with process_faults(first) as faults:
        asyncio.run(_happen(faults["full memory, and the kernel kills"]))
    wait_for(worker, "Z")
    assert Path(f"/proc/{first}/cgroup").read_text() == group
    left = [root.glob("ullage-verify-*") for root in memory_limit.ROOTS if root.is_dir()]
    assert not [folder for folders in left for folder in folders]


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_an_interrupted_fault_leaves_no_process_and_no_limit(server: tuple[int, int]) -> None:
    """Nothing more fills the memory when the limit is gone."""
    first, worker = server
    group = Path(f"/proc/{worker}/cgroup").read_text()

    async def interrupted(fault: object) -> None:
        task = asyncio.create_task(_happen(fault))
        await asyncio.sleep(0.6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with process_faults(first) as faults:
        asyncio.run(interrupted(faults["full memory, and the kernel kills"]))
    assert state(worker) == "Z" or Path(f"/proc/{worker}/cgroup").read_text() == group
    left = [root.glob("ullage-verify-*") for root in memory_limit.ROOTS if root.is_dir()]
    assert not [folder for folders in left for folder in folders]
    hogs = [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_hog(path)]
    assert not hogs


def is_hog(path: Path) -> bool:
    try:
        return b"os.fork() == 0" in path.read_bytes()
    except OSError:
        return False


@pytest.fixture
def pair() -> Iterator[tuple[int, socket.socket]]:
    """Yield the id of the first of two connected processes, and a client's connection to it."""
    command = [sys.executable, "-c", FRONT, BACK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                yield process.pid, client
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def echo_s(client: socket.socket) -> float:
    """Return the seconds until a byte has passed both processes."""
    began = time.monotonic()
    client.sendall(b"x")
    assert client.recv(1) == b"x"
    return time.monotonic() - began


def test_the_address_of_clients_is_no_internal_port(pair: tuple[int, socket.socket]) -> None:
    first, client = pair
    echo_s(client)
    ports = internal_ports(ServerProcesses(first).family())
    assert len(ports) == 1
    assert client.getpeername()[1] not in ports


@pytest.mark.skipif(
    not IS_ROOT or shutil.which("nft") is None, reason="dropping packets needs root and nft"
)
def test_packets_between_processes_are_dropped_for_a_time(
    pair: tuple[int, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults_module, "PARTITION_S", PARTITION_S)
    first, client = pair
    echo_s(client)

    async def scenario(fault: object) -> float:
        task = asyncio.create_task(_happen(fault))
        await asyncio.sleep(PARTITION_S / 2)
        seconds = await asyncio.to_thread(echo_s, client)
        await task
        return seconds

    with process_faults(first) as faults:
        assert asyncio.run(scenario(faults["partition between the processes"])) > PARTITION_S / 3
    echo_s(client)
    rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    assert "ullage_verify" not in rules.stdout


KILLED_PARTITION = """
import os, sys
from ullage_verify import partition
partition.GRACE_S = 1
with partition.dropped_packets({int(sys.argv[1])}, 0.0):
    print(partition.TABLE, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(
    not IS_ROOT or shutil.which("nft") is None, reason="dropping packets needs root and nft"
)
def test_a_partition_ends_even_if_the_command_is_killed(pair: tuple[int, socket.socket]) -> None:
    first, client = pair
    echo_s(client)
    (port,) = internal_ports(ServerProcesses(first).family())
    command = [sys.executable, "-c", KILLED_PARTITION, str(port)]
    table = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        assert echo_s(client) > 0.3
        echo_s(client)
    finally:
        subprocess.run(["nft", "delete", "table", "inet", table], check=True)


@pytest.mark.skipif(not IS_ROOT, reason="another network namespace needs root")
def test_processes_in_another_network_have_no_partition() -> None:
    command = ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        with (
            process_faults(process.pid) as faults,
            pytest.raises(TargetError, match="another network namespace"),
        ):
            asyncio.run(_happen(faults["partition between the processes"]))
        process.communicate(b"\n")


def test_processes_without_connections_have_no_partition(server: tuple[int, int]) -> None:
    with (
        process_faults(server[0]) as faults,
        pytest.raises(TargetError, match="not connected to each other"),
    ):
        asyncio.run(_happen(faults["partition between the processes"]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not IS_ROOT, reason="mounting a small file system needs root")
def test_a_disk_is_full_for_a_time(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_module, "FULL_DISK_S", FULL_S)
    kept = small_disk / "kept"
    kept.write_bytes(b"1" * 100_000)

    async def scenario() -> None:
        task = asyncio.create_task(_happen(disk_faults(small_disk)["full disk"]))
        await asyncio.sleep(FULL_S / 2)
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "new").write_bytes(b"1" * 100_000)
        await task

    asyncio.run(scenario())
    (small_disk / "new").write_bytes(b"1" * 100_000)
    assert kept.read_bytes() == b"1" * 100_000


def test_a_large_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_module, "MAX_FILL_BYTES", 0)
    with pytest.raises(TargetError, match=r"--disk .*may harm others"):
        disk_faults(tmp_path)
    with pytest.raises(TargetError, match=r"--disk .*No such file.*give an existing folder"):
        disk_faults(tmp_path / "absent")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_clock_jumps_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """The real clock stays, because other tests read it."""
    monkeypatch.setattr(faults_module, "CLOCK_WRONG_S", 0.2)
    jumps: list[float] = []
    monkeypatch.setattr(time, "clock_settime", lambda _, at: jumps.append(at - time.time()))

    async def scenario() -> None:
        task = asyncio.create_task(_happen(clock_faults()["a clock that jumps"]))
        await asyncio.sleep(0.05)
        if is_interrupted:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert [round(jump) for jump in jumps] == [3600, -3600]


def test_a_clock_that_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(clock: int, at: float) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(time, "clock_settime", refuse)
    with pytest.raises(TargetError, match=r"clock cannot be set .*; run as root"):
        asyncio.run(_happen(clock_faults()["a clock that jumps"]))


def test_errors_name_the_option() -> None:
    with (
        pytest.raises(TargetError, match="--pid 4194304: no such process"),
        process_faults(4194304),
    ):
        pass
    with pytest.raises(TargetError, match=r"--admin 127\.0\.0\.1:9: "):
        asyncio.run(_happen(admin_faults("127.0.0.1:9")["death of the worker"]))


def test_a_pod_is_deleted_by_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\necho pod/chat-single-0\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fault = pod_faults("prod", ["chat-single-0"])["death of the pod chat-single-0"]
    asyncio.run(_happen(fault))
    said = (tmp_path / "said").read_text()
    assert said.startswith("--namespace prod delete pod chat-single-0 --grace-period=0 --force")

    kubectl.write_text("#!/bin/sh\necho 'pod not found' >&2; exit 1\n")
    with pytest.raises(TargetError, match="pod not found"):
        asyncio.run(_happen(fault))


def kubectl_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a kubectl on PATH that records its arguments, and return the file with them."""
    said = tmp_path / "said"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >> {said}\n{script}\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return said


def test_pods_may_have_a_namespace_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = kubectl_that(tmp_path, monkeypatch, "echo pod/chat-0")
    for fault in pod_faults("prod", ["other:chat-0", "ops:part=operator"]).values():
        asyncio.run(_happen(fault))
    first, second = said.read_text().splitlines()
    assert first.startswith("--namespace other delete pod chat-0 ")
    assert second.startswith("--namespace ops delete pod --selector part=operator ")


def test_labels_without_a_pod_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl_that(tmp_path, monkeypatch, "echo 'No resources found' >&2")
    with pytest.raises(TargetError, match=r"--pod part=nothing: no pod has these labels"):
        asyncio.run(_happen(pod_faults("prod", ["part=nothing"])["death of the pod part=nothing"]))


DRAINED = """
test "$3" = drain || exit 0
echo pod/chat-0 evicted
echo "unable to drain node: global timeout reached: 30s" >&2
exit 1
"""


def drain_fault() -> object:
    return node_faults("prod", "node-3", "part=engine")["drain of the node node-3"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ('test "$3" = get && echo true; exit 0', "is cordoned already"),
        ('test "$3" = drain && echo "no rights" >&2 && exit 1; exit 0', "no rights"),
        ("exit 0", "no engine of the service was evicted"),
    ],
)
def test_a_node_that_was_not_drained_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str
) -> None:
    said = kubectl_that(tmp_path, monkeypatch, script)
    with pytest.raises(TargetError, match=error):
        asyncio.run(_happen(drain_fault()))
    assert ("uncordon" in said.read_text()) == ("cordoned" not in error)


def test_a_drained_node_is_uncordoned_even_if_a_pod_must_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = kubectl_that(tmp_path, monkeypatch, DRAINED)
    asyncio.run(_happen(drain_fault()))
    _, drain, uncordon = said.read_text().splitlines()
    assert drain.startswith("--namespace prod drain node-3 ")
    assert "--pod-selector=part=engine" in drain
    assert uncordon == "--namespace prod uncordon node-3"


def test_a_kubectl_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("ullage_verify.faults.KUBECTL_TIMEOUT_S", 0.5)
    with pytest.raises(TargetError, match=r"no answer in 0\.5 s"):
        asyncio.run(_happen(pod_faults("prod", ["chat-0"])["death of the pod chat-0"]))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_memory_that_cannot_be_filled_is_no_kill(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "_HOG", "raise SystemExit(3)")
    with (
        process_faults(server[0]) as faults,
        pytest.raises(TargetError, match="ended with status 3"),
    ):
        asyncio.run(_happen(faults["full memory, and the kernel kills"]))
    assert state(server[1]) != "Z"


def test_kubectl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(TargetError, match="kubectl is missing"):
        asyncio.run(_happen(pod_faults("a", ["b"])["death of the pod b"]))


NEIGHBOUR = "a neighbour takes memory and frees it"


@pytest.fixture
def small_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "MAX_BYTES", 96 << 20)
    monkeypatch.setattr(neighbour, "PAUSE_S", 0.3)


def neighbours() -> list[int]:
    """Return the ids of the neighbours that this process has started."""
    found = []
    for pid in ServerProcesses(os.getpid()).family():
        with contextlib.suppress(OSError):
            if b"ullage_verify.neighbour" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def oom_score(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
    except OSError:
        return ""


def resident_mib(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.usefixtures("small_neighbour")
def test_a_neighbour_takes_memory_and_frees_it(server: tuple[int, int]) -> None:
    sizes: list[int] = []
    scores: set[str] = set()

    async def scenario() -> None:
        with process_faults(server[0]) as faults:
            task = asyncio.create_task(_happen(faults[NEIGHBOUR]))
            while not task.done():
                for pid in neighbours():
                    sizes.append(resident_mib(pid))
                    scores.add(oom_score(pid))
                await asyncio.sleep(0.02)
            await task

    asyncio.run(scenario())
    assert 96 <= max(sizes) < 96 + 60
    peaks = sum(one < 96 <= two for one, two in itertools.pairwise(sizes))
    assert peaks == faults_module.NEIGHBOUR_ROUNDS, sizes
    is_low = [size < 96 for size in sizes[sizes.index(max(sizes)) :]]
    assert sum(is_low) > 5, "memory stays free for a time, not just for a moment"
    assert "1000" in scores
    assert not neighbours()
    assert state(server[1]) in "SR"


@pytest.mark.usefixtures("small_neighbour")
def test_an_interrupted_neighbour_is_ended(server: tuple[int, int]) -> None:
    async def scenario() -> None:
        with process_faults(server[0]) as faults:
            task = asyncio.create_task(_happen(faults[NEIGHBOUR]))
            while not any(resident_mib(pid) >= 96 for pid in neighbours()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert not neighbours()


@pytest.mark.usefixtures("small_neighbour")
def test_a_process_is_killed_beside_a_neighbour(server: tuple[int, int]) -> None:
    with process_faults(server[0]) as faults:
        asyncio.run(_happen(faults["SIGKILL while a neighbour takes memory and frees it"]))
    wait_for(server[1], "Z")
    assert not neighbours()


@pytest.mark.parametrize(
    ("available", "error"),
    [(100 << 20, "could take only 50 MiB without harm"), (1 << 60, "memory ran low")],
)
@pytest.mark.usefixtures("small_neighbour")
def test_a_neighbour_takes_no_memory_that_others_need(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch, available: int, error: str
) -> None:
    """The second one finds less than it was promised, as after others have taken memory."""
    monkeypatch.setattr(neighbour, "available_bytes", lambda _: available)
    with process_faults(server[0]) as faults, pytest.raises(TargetError, match=error):
        asyncio.run(_happen(faults[NEIGHBOUR]))
    assert not neighbours()


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_a_neighbour_is_in_the_group_of_the_server(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the server's container applies to the neighbour, too."""
    monkeypatch.setattr(neighbour, "PAUSE_S", 0.3)

    async def peak(group: memory_limit.MemoryLimit) -> int:
        peak_bytes = 0
        with process_faults(server[0]) as faults:
            task = asyncio.create_task(_happen(faults[NEIGHBOUR]))
            while not task.done():
                peak_bytes = max(peak_bytes, group.used_bytes())
                await asyncio.sleep(0.02)
            await task
        return peak_bytes

    with memory_limit.memory_limit("ullage-verify-test-neighbour") as group:
        group.limit(400 << 20)
        group.take(server[0])
        try:
            assert 180 << 20 < asyncio.run(peak(group)) < 260 << 20
            assert not group.num_kills()
        finally:
            group.release()


LEAKING = """
import multiprocessing.shared_memory, subprocess, sys, time
while True:
    worker = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
    worker.wait()
"""
"""Program that starts its worker again whenever the worker has ended."""
LEAKING_WORKER = """
import mmap, os, pathlib, sys, time
own = pathlib.Path("/dev/shm") / f"{sys.argv[1]}-{os.getpid()}"
if sys.argv[2] == "clean":
    for path in own.parent.glob(f"{sys.argv[1]}-*"):
        path.unlink()
own.write_bytes(b"1" * 100_000)
with open(own, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
held = b"1" * (120 << 20)
pathlib.Path(sys.argv[3]).touch()
while True:
    sum(range(10_000))
    time.sleep(0.001)
"""
"""Program that maps a file in /dev/shm. It removes files of earlier workers if it is `clean`."""


@contextlib.contextmanager
def sharing_server(kind: str, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Yield a server's first process, and the file that each worker touches when it is up."""
    prefix = f"ullage-test-{os.getpid()}"
    is_up = tmp_path / "up"
    command = [sys.executable, "-c", LEAKING, LEAKING_WORKER, prefix, kind, str(is_up)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_for_file(is_up)
            yield process.pid, is_up
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            for path in Path("/dev/shm").glob(f"{prefix}-*"):
                path.unlink()


def wait_for_file(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_files_of_killed_processes_are_counted(tmp_path: Path) -> None:
    with sharing_server("leaky", tmp_path) as (pid, is_up):
        processes = ServerProcesses(pid)
        files = SharedFiles(processes)
        before = files.use()
        assert before.num_files == 1
        assert before.num_bytes >= 100_000

        others = Path(f"/dev/shm/other-{os.getpid()}")
        others.write_bytes(b"1")
        try:
            is_up.unlink()
            processes.send(signal.SIGKILL)
            wait_for_file(is_up)
            after = files.use()
        finally:
            others.unlink()
    assert after == (2, 2 * before.num_bytes), "the file of another process does not count"
