"""Finds programs, runs them to their end, or starts them until the cluster stops."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ullage_local_cluster.settings import ClusterError

PACKAGES = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables-restore": "iptables",
    "iptables-save": "iptables",
    "openssl": "openssl",
    "kubectl": "kubernetes-client",
    "gcc": "gcc",
}
"""The Debian package of each program that a cluster needs."""
KILL_S = 15
READY_S = 120
SHOWN_LINES = 15
REPORT_S = 20
"""Seconds between two reports that a long command is still running."""


def check_programs() -> None:
    """Check that all programs are on PATH.

    Raises:
        ClusterError: Programs are missing. The message has the command that installs them.
    """
    missing = [program for program in PACKAGES if not shutil.which(program)]
    if missing:
        packages = sorted({PACKAGES[program] for program in missing})
        raise ClusterError(
            f"not on PATH: {', '.join(missing)}; on Debian: apt-get install {' '.join(packages)}"
        )


def run(*command: str | Path, check: bool = True, env: Mapping[str, str] = {}) -> str:
    """Run a short command and return its output."""
    words = [str(word) for word in command]
    environment = {**os.environ, **env}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(words[:6])} ended with {done.returncode}: {said}")
    return done.stdout


def run_long(
    title: str, command: Sequence[str | Path], log: Path, folder: Path, env: Mapping[str, str] = {}
) -> None:
    """Run a command that takes minutes, and report from time to time that it is still running."""
    began = time.monotonic()
    print(f"{title} (log: {log}) ...", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)

    with log.open("w") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env={**os.environ, **env},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    process.wait(REPORT_S)
                    break
                except subprocess.TimeoutExpired:
                    print(f"  {time.monotonic() - began:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()

    if process.returncode:
        raise ClusterError(f"{title} failed with {process.returncode}:\n{tail(log)}")
    print(f"  done after {time.monotonic() - began:.0f} s", flush=True)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-SHOWN_LINES:])


def wait_until(is_true: Callable[[], object], program: str, home: Path) -> None:
    """Wait until a started program is ready.

    Raises:
        ClusterError: The program has ended, or is not ready in time. The message ends with the last
            lines of the program's log.
    """
    log = home / "log" / f"{program}.log"
    deadline = time.monotonic() + READY_S
    while not is_true():
        if not running_pid(home / f"{program}.pid"):
            raise ClusterError(f"{program} has ended; {log} ends:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{program} is not ready after {READY_S} s; {log} ends:\n{tail(log)}"
            )
        time.sleep(0.3)


def start(
    name: str, command: Sequence[str | Path], home: Path, env: Mapping[str, str] = {}
) -> None:
    """Start a program, and write its process id and its log to files in the cluster's folder."""
    words = [str(word) for word in command]
    log = str(home / "log" / f"{name}.log")
    pid = os.posix_spawnp(
        words[0],
        words,
        {**os.environ, **env},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        # Ctrl-C ends the suite first, and the cluster after it.
        setsid=True,
        setsigdef=[signal.SIGPIPE],
    )
    (home / f"{name}.pid").write_text(f"{pid} {start_time(pid)}")


def start_time(pid: int) -> str:
    """Return when a process started, in ticks since boot (empty if there is no such process).

    The kernel reuses process ids. An id and this time together identify one process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *others = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else others[18]


def running_pid(file: Path) -> int | None:
    """Return the id of the process that a file names, if the process is still running."""
    try:
        pid, started = file.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def session(leader: int) -> set[int]:
    """Return the processes in a session: all descendants of its leader that have not left it."""
    pids = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, _, its_session, *_ = file.read_text().rpartition(")")[2].split()
            if int(its_session) == leader:
                pids.add(int(file.parent.name))
    return pids


def kill_all(find: Callable[[], Iterable[int]]) -> None:
    """Send SIGKILL to processes until no process is found.

    Raises:
        ClusterError: Some processes are still running.
    """
    deadline = time.monotonic() + KILL_S
    while pids := {pid for pid in find() if start_time(pid)}:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {sorted(pids)} do not end; look at their state with ps")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
