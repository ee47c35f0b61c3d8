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
