"""Breaks things inside pods."""

from ullage_cluster.kubectl import Kubectl

_KILL_WORKER = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if b"ullage_engine.worker.main" in words:
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
