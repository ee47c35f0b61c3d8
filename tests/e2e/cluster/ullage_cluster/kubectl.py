"""kubectl in one namespace, and waiting for what it shows."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

Object = dict[str, Any]

PATIENCE_S = 420.0
"""For what takes an engine's start or its end with a drain, on slow and busy nodes."""


def until(
    ask: Callable[[], Any], what: str, seconds: float = PATIENCE_S, pause: float = 1.0
) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
    return answer


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl as a user would."""

    namespace: str

    def command(self, *arguments: str) -> list[str]:
        return ["kubectl", "--namespace", self.namespace, *arguments]

    def run(
        self, *arguments: str, stdin: str = "", timeout: float = 180.0
    ) -> subprocess.CompletedProcess[str]:
        """Whatever it answers."""
        return subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def __call__(self, *arguments: str, stdin: str = "", timeout: float = 180.0) -> str:
        """What it prints; a failure fails the test."""
        done = self.run(*arguments, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    def apply(self, manifest: Object) -> str:
        return self("apply", "--filename", "-", stdin=yaml.safe_dump(manifest))

    def get(self, kind: str, name: str) -> Object:
        """An object; empty if there is none."""
        text = self("get", kind, name, "--ignore-not-found", "--output", "json")
        return json.loads(text) if text else {}

    def listed(self, kinds: str, selector: str = "") -> list[Object]:
        text = self("get", kinds, "--selector", selector, "--output", "json")
        return list(json.loads(text)["items"])

    def patch(self, kind: str, name: str, body: Object) -> str:
        return self("patch", kind, name, "--type", "merge", "--patch", json.dumps(body))

    def uid(self, kind: str, name: str) -> str:
        return str(self.get(kind, name).get("metadata", {}).get("uid", ""))


@contextmanager
def extended_resource(kubectl: Kubectl, name: str, size: int) -> Iterator[None]:
    """Gives the first node so many of a resource, as a device plugin would."""
    node = names(kubectl.listed("nodes"))[0]
    path = f"/status/capacity/{name.replace('/', '~1')}"

    def patch(operation: str, **value: str) -> None:
        body = json.dumps([{"op": operation, "path": path, **value}])
        kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={body}")

    def allocatable() -> str | None:
        return kubectl.get("node", node)["status"]["allocatable"].get(name)

    patch("add", value=str(size))
    until(lambda: allocatable() == str(size), f"the node has {size} {name}")
    try:
        yield
    finally:
        patch("remove")


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready and stays."""
    found = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    return found.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def restarts(pods: list[Object]) -> int:
    """How often containers of the pods were started anew."""
    statuses = [s for pod in pods for s in pod["status"].get("containerStatuses", ())]
    return sum(status["restartCount"] for status in statuses)


def names(objects: list[Object]) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in objects)
