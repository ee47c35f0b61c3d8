"""Programs: found, run to their end, or started to run until the cluster stops."""

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
    "openssl": "openssl",
    "kubectl": "kubernetes-client",
    "gcc": "gcc libc6-dev",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
"""Debian's packages of the programs."""
GRACE_S = 15
SHOWN_LINES = 15
REPORT_S = 20
"""How often a long command says that it still runs."""


def need(programs: Iterable[str]) -> None:
    """Check that programs are on PATH.

    Raises:
        ClusterError: Programs are missing; the message has the command that installs them.
    """
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        packages = sorted({PACKAGES[program] for program in missing})
        raise ClusterError(
            f"not on PATH: {', '.join(missing)}; on Debian: apt-get install {' '.join(packages)}"
        )


def run(*command: str | Path, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    """Run a short command and return its output."""
    words = [str(word) for word in command]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(words[:6])} ended with {done.returncode}: {said}")
    return done.stdout


def run_long(
    title: str, command: Sequence[str | Path], log: Path, folder: Path, env: Mapping[str, str]
) -> None:
    """Run a command of minutes, and print from time to time that it still runs."""
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


def wait_until(is_true: Callable[[], object], title: str, log: Path, seconds: float = 120) -> None:
    """Wait for a state of the cluster.

    Raises:
        ClusterError: It has not come in time; the message ends with the last lines of the log.
    """
    began = time.monotonic()
    reported = began
    while not is_true():
        now = time.monotonic()
        if now > began + seconds:
            raise ClusterError(f"{title}: not within {seconds:.0f} s; {log} ends:\n{tail(log)}")
        if now > reported + REPORT_S:
            print(f"  {title}: {now - began:.0f} s", flush=True)
            reported = now
        time.sleep(0.3)


def start(name: str, command: Sequence[str | Path], home: Path) -> None:
    """Start a program whose process id and log are files of the cluster's folder."""
    with (home / "log" / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (home / f"{name}.pid").write_text(f"{process.pid} {start_time(process.pid)}")


def start_time(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty where there is none.

    The kernel uses process ids again. Together with this time an id stands for one process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *others = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else others[18]


def running_pid(file: Path) -> int | None:
    """Return the id of the process that a file names, if it still runs."""
    try:
        pid, started = file.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def stop(name: str, home: Path) -> None:
    """End a program of the cluster."""
    file = home / f"{name}.pid"
    if pid := running_pid(file):
        end([pid])
    file.unlink(missing_ok=True)


def end(pids: Iterable[int]) -> None:
    """Send SIGTERM, and SIGKILL to the processes that do not end in time."""
    alive = {pid: start_time(pid) for pid in pids}
    for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for pid in alive:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + seconds
        while alive and time.monotonic() < deadline:
            alive = {pid: at for pid, at in alive.items() if at and start_time(pid) == at}
            time.sleep(0.05)
        if not alive:
            return
    raise ClusterError(f"processes {sorted(alive)} do not end; look at their state with ps")
