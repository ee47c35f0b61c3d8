"""Reads pod logs, either from files in a folder or from a cluster with kubectl."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ullage_cli.processes.pod_log import rotated
from ullage_operator.api.errors import LocalFailure

PART_OF = "app.kubernetes.io/part-of=ullage"
"""Label selector that matches all of Ullage's pods."""
INSTANCE = "app.kubernetes.io/instance"
"""Label that holds the name of a pod's LLMService."""
KUBECTL_S = 60.0
"""Timeout of one kubectl command, in seconds."""
READERS = 8
"""Number of pods whose logs are read concurrently."""


class Log(NamedTuple):
    """The log lines of all processes in one pod."""

    pod: str
    lines: Iterable[str]


def logs_of_files(folder: Path) -> list[Log]:
    """Return the logs in a folder, one for each pod, with the lines of rotated files.

    Raises:
        LocalFailure: the folder does not exist, or has no logs.
    """
    paths = sorted(folder.glob("*.log"))
    if not paths:
        problem = "has no *.log" if folder.is_dir() else "is not a folder"
        raise LocalFailure(f"--logs {folder}: {problem}; ullage up prints its folder as logs")
    return [Log(path.stem, _lines_of(path)) for path in paths]


def _lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a log, after those of the older file of its last rotation."""
    with contextlib.ExitStack() as stack:
        # The newer file is opened first, so that a rotation in between loses no line.
        file = stack.enter_context(path.open(encoding="utf-8", errors="replace"))
        if rotated(path).exists():
            older = stack.enter_context(rotated(path).open(encoding="utf-8", errors="replace"))
            if not os.path.sameopenfile(older.fileno(), file.fileno()):
                yield from older
        yield from file


def logs_of_pods(namespace: str, service: str | None, since: str) -> list[Log]:
    """Return the logs of a namespace's pods, including those from before a container's restart.

    Args:
        namespace: namespace of the pods.
        service: the pods' LLMService, or None for all services.
        since: maximum age of lines in kubectl's notation, for example 1h.

    Raises:
        LocalFailure: kubectl is not installed or fails for all pods, or there is no pod.
    """
    if shutil.which("kubectl") is None:
        raise LocalFailure("--namespace needs kubectl; install it, or give saved logs with --logs")

    labels = f"{PART_OF},{INSTANCE}={service}" if service else PART_OF
    listed = json.loads(_kubectl(namespace, "get", "pods", "-l", labels, "-o", "json"))
    pods = [_restarts_of(pod) for pod in listed["items"]]
    if not pods:
        raise LocalFailure(
            f"no pods with labels {labels} in namespace {namespace}; name the namespace of the "
            "LLMService with --namespace"
        )

    wanted: list[tuple[str, list[str]]] = []
    for name, restarts in pods:
        wanted.append((name, []))
        if restarts:
            wanted.append((name, ["--previous"]))
    print(f"reading the logs of {len(pods)} pods ...", file=sys.stderr)

    def read(one: tuple[str, list[str]]) -> Log | LocalFailure:
        name, flags = one
        command = ["logs", name, "--all-containers", f"--since={since}", *flags]
        try:
            return Log(name, _kubectl(namespace, *command).splitlines())
        except LocalFailure as failure:
            return failure

    with ThreadPoolExecutor(READERS) as readers:
        answers = list(readers.map(read, wanted))

    # A starting pod has no log yet, and the log from before a restart may be gone.
    failures = [each for each in answers if isinstance(each, LocalFailure)]
    if len(failures) == len(answers):
        raise failures[0]
    for failure in failures:
        print(f"left out: {failure}", file=sys.stderr)
    return [each for each in answers if isinstance(each, Log)]


def _restarts_of(pod: Mapping[str, Any]) -> tuple[str, int]:
    """Return a pod's name, and the total number of container restarts."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return pod["metadata"]["name"], sum(status.get("restartCount", 0) for status in statuses)


def _kubectl(namespace: str, *arguments: str) -> str:
    command = ["kubectl", "--namespace", namespace, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_S)
    except subprocess.TimeoutExpired:
        raise LocalFailure(f"{' '.join(command)}: timed out after {KUBECTL_S:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise LocalFailure(f"{' '.join(command)}: {said}")
    return done.stdout
