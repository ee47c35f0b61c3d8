"""Breaks things inside pods."""

import os
import signal
from pathlib import Path

from ullage_cluster.kubectl import Kubectl

SERVER = "ullage-engine"
"""Program of an engine's server, the first process of its container."""

_KILL_WORKER = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    # A forked process shows its command line as one word. This script's own has the same words.
    is_worker = b"-m ullage_engine.worker.main " in (folder / "cmdline").read_bytes()
    if is_worker and int(folder.name) != os.getpid():
        os.kill(int(folder.name), signal.SIGKILL)
        print("killed", folder.name)
"""


def kill_worker(kubectl: Kubectl, pod: str) -> None:
    """SIGKILL for the process that computes; the pod's server lives on."""
    assert "killed" in kubectl("exec", pod, "--", "python3", "-c", _KILL_WORKER)


# The kernel prefers what is large and what asks for it: many small processes outlive the engine's.
_TAKE_MEMORY = """
import os, pathlib, time
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if int(folder.name) != os.getpid():
        (folder / "oom_score_adj").write_text("1000")
while True:
    if not os.fork():
        taken = b"x" * (64 << 20)
        time.sleep(600)
    time.sleep(0.1)
"""


def exhaust_memory(kubectl: Kubectl, pod: str) -> None:
    """Takes memory beside the engine until the kernel kills all of the container."""
    done = kubectl.run("exec", pod, "--", "python3", "-c", _TAKE_MEMORY)
    assert done.returncode != 0


def force_delete(kubectl: Kubectl, pod: str) -> None:
    """Ends a pod without a word to it; one that is gone already is no error."""
    now = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")
    kubectl("delete", "pod", pod, *now)


def servers(pod_uid: str) -> list[int]:
    """Return the pids of a pod's engine servers, as its node sees them.

    Empty where the node is another machine, for nobody inside of a container can stop its first
    process.
    """
    spellings = (pod_uid, pod_uid.replace("-", "_"))
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            groups = (folder / "cgroup").read_text()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            # The process ended meanwhile.
            continue
        is_server = any(Path(os.fsdecode(word)).name == SERVER for word in words)
        if is_server and any(spelling in groups for spelling in spellings):
            found.append(int(folder.name))
    return found


def hang(pids: list[int]) -> None:
    """Stop processes, which keep their connections and answer nothing any more."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
