"""Asks services from a pod of the cluster, through kubectl exec."""

import json
import math
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage_cluster.kubectl import PATIENCE_S, Kubectl, until
from ullage_cluster.service import Service

SCRIPT = Path(__file__).parent / "ask.py"
POD = "client"


@dataclass(frozen=True)
class Answer:
    """How one request ended."""

    status: int
    text: str
    finish: str
    error: str
    headers: dict[str, str] = field(repr=False)

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and not self.error and self.finish in ("stop", "length")

    @property
    def engine(self) -> str:
        return self.headers.get("x-ullage-engine", "")


@dataclass(frozen=True)
class Client:
    """The pod that asks."""

    kubectl: Kubectl

    def ask(self, service: Service, prompts: Sequence[str], **options: Any) -> list[Answer]:
        """Streams the answers to all prompts at once, in their order."""
        with self.streams(service, prompts, **options) as streams:
            return streams.answers()

    @contextmanager
    def streams(
        self, service: Service, prompts: Sequence[str], **options: Any
    ) -> Iterator["Streams"]:
        """The same while the test does something else."""
        model = service.get()["spec"]["model"]["name"]
        if options.pop("stop", False):
            options["stop_file"] = f"/tmp/stop-{uuid.uuid4().hex}"
        request = {"url": service.url, "prompts": list(prompts), "model": model, **options}
        command = self.kubectl.command("exec", "--stdin", POD, "--", "python3", "-")
        process = subprocess.Popen(
            [*command, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stop = request.get("stop_file", "")
        streams = Streams(process, lambda: self.kubectl("exec", POD, "--", "touch", stop))
        try:
            yield streams
        finally:
            streams.end()


class Streams:
    """Requests under way."""

    def __init__(self, process: "subprocess.Popen[str]", stop: Callable[[], object]) -> None:
        self._process = process
        self._stop = stop
        self._started: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ended: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        assert process.stdin
        process.stdin.write(SCRIPT.read_text())
        process.stdin.close()
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                self._started.put(event)
            else:
                self._ended.append(event)

    def started(self, count: int) -> list[str]:
        """Waits for the first tokens of this many streams; the engines that they came from."""
        until(
            lambda: self._started.qsize() >= count or self._ended or not self._reader.is_alive(),
            f"{count} streams run",
        )
        assert self._started.qsize() >= count, self._ended or self._error()
        return [self._started.get()["headers"]["x-ullage-engine"] for _ in range(count)]

    def answers(self) -> list[Answer]:
        """Waits for the ends of all."""
        status = self._process.wait(PATIENCE_S)
        self._reader.join()
        assert status == 0, self._error()
        fields = ("status", "text", "finish", "error", "headers")
        ordered = sorted(self._ended, key=lambda event: event["number"])
        return [Answer(*(event[name] for name in fields)) for event in ordered]

    def _error(self) -> str:
        assert self._process.stderr
        return self._process.stderr.read()

    def stop(self) -> list[Answer]:
        """Has repeated requests end after those that run now; then as `answers`."""
        self._stop()
        return self.answers()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()


def pod(image: str) -> dict[str, Any]:
    """A pod that does nothing until it is told."""
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    waits = ["python3", "-c", "import signal; signal.sigwait([signal.SIGTERM])"]
    container = {
        "name": POD,
        "image": image,
        "command": waits,
        "securityContext": locked,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "containers": [container],
        "securityContext": user,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD}, "spec": spec}


def start_client(kubectl: Kubectl, image: str) -> None:
    """The pod that asks from inside the cluster."""
    kubectl.apply(pod(image))
    kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=170s")


RESOLVED = "serving.ullage.dev/e2e-resolved"
"""Label of pods that the measured name has the addresses of."""
_LOOK_UP = """
import socket, sys, time
name, is_wanted = sys.argv[1], sys.argv[2] == "True"
end, streak = time.monotonic() + 150, 0
while streak < 20:
    try:
        is_there = bool(socket.getaddrinfo(name, 80))
    except socket.gaierror:
        is_there = False
    streak = streak + 1 if is_there is is_wanted else 0
    assert time.monotonic() < end, name
    time.sleep(0.02)
"""


def dns_lag_s(kubectl: Kubectl) -> int:
    """For how many seconds the cluster's DNS answers what it knew, measured from the client's pod.

    A name must be gone from many answers in a row, for there may be several caches.
    """
    name = "e2e-dns"
    spec = {"clusterIP": "None", "selector": {RESOLVED: "yes"}, "ports": [{"port": 80}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
    look_up = ("exec", POD, "--", "python3", "-c", _LOOK_UP, name)
    kubectl.apply(service)
    kubectl("label", "pod", POD, f"{RESOLVED}=yes", "--overwrite")
    kubectl(*look_up, "True")
    began = time.monotonic()
    kubectl("label", "pod", POD, f"{RESOLVED}-")
    kubectl(*look_up, "False")
    kubectl("delete", "service", name, "--wait=false")
    return math.ceil(time.monotonic() - began)
