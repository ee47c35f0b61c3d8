"""Measure what many LLMServices cost the operator: first reconciliation, restart, idling, edits.

The benchmark runs the real operator in a separate namespace of the API server that KUBECONFIG
names. If KUBECONFIG is not set, the tests' API server runs in this process. Each figure is printed
on one line.

On a real cluster, cordon the nodes first. Otherwise the routers of all services are scheduled.

examples:
  python -m benchmarks operator --services 1000
  python -m benchmarks operator --quick
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.options import new_parser
from benchmarks.support.processes import end, free_ports
from ullage_operator.api.naming import OWNED, SERVICE, kind_of
from ullage_operator.kube.connection import ApiConnection

ROOT = Path(__file__).resolve().parents[1]
CRD = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAMESPACE = "ullage-operator-benchmark"
STATEFUL_SET = kind_of("apps/v1", "StatefulSet")
AT_ONCE = 2
POLL_S = 0.005
PATIENCE_S = 1800.0


def parser() -> argparse.ArgumentParser:
    options = new_parser("operator", __doc__)
    options.add_argument("--services", type=int, default=1000)
    options.add_argument(
        "--seconds", type=float, default=30.0, help="duration of the measurement at rest"
    )
    options.add_argument(
        "--settle",
        type=float,
        default=5.0,
        help="seconds to wait before the measurement at rest (minutes on a real cluster)",
    )
    options.add_argument("--edits", type=int, default=20)
    options.add_argument("--quick", action="store_true", help="20 services, 3 s, 3 edits")
    return options


def manifest(number: int) -> dict[str, Any]:
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.name,
        "metadata": {"name": f"s{number}", "namespace": NAMESPACE},
        "spec": {
            "model": {"source": "file:///model", "name": "m"},
            "device": "CPU",
            "pools": {"single": {"replicas": 0}},
        },
    }


@contextlib.contextmanager
def api_server() -> Iterator[None]:
    """Run an API server if needed, and set KUBECONFIG for it, while the block runs."""
    if os.environ.get("KUBECONFIG"):
        yield
        return
    sys.path.insert(0, str(ROOT / "tests" / "kubeapi"))
    from ullage_kubeapi.server import running

    with tempfile.TemporaryDirectory() as folder, running(collects=False) as api:
        os.environ["KUBECONFIG"] = str(api.kubeconfig(Path(folder)))
        yield


@contextlib.contextmanager
def operator() -> Iterator[tuple[psutil.Process, str]]:
    """Run the operator while the block runs, and yield its process and its metrics URL."""
    probes, metrics = free_ports(2)
    ports = [f"--probes-port={probes}", f"--metrics-port={metrics}", "--host=127.0.0.1"]
    flags = [f"--namespace={NAMESPACE}", "--log-level=warning"]
    command = [sys.executable, "-m", "ullage_operator.main", *ports, *flags]
    process = subprocess.Popen(command)
    try:
        yield psutil.Process(process.pid), f"http://127.0.0.1:{metrics}/metrics"
    finally:
        end(process)


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Connect to the API server, and create the namespace and the CRD.

    The namespace is deleted at the end of the block.
    """
    connection = ApiConnection()
    api = await connection.api()
    headers = await connection.headers()
    await connection.close()
    verify = api.rest_client.ssl_context

    async with httpx.AsyncClient(
        base_url=api.configuration.host, verify=verify, headers=headers, timeout=60
    ) as opened:
        await opened.post("/api/v1/namespaces", json={"metadata": {"name": NAMESPACE}})
        await opened.post(CRDS, json=yaml.safe_load(CRD.read_text()))
        await is_served(opened)

        try:
            yield opened
        finally:
            await opened.delete(f"/api/v1/namespaces/{NAMESPACE}")


async def is_served(api: httpx.AsyncClient) -> None:
    for _ in range(600):
        if (await api.get(SERVICE.path(NAMESPACE))).status_code == 200:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the API server does not serve LLMServices")


async def create(api: httpx.AsyncClient, count: int) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            response = await api.post(SERVICE.path(NAMESPACE), json=manifest(number))
            response.raise_for_status()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def all_reported(api: httpx.AsyncClient, count: int) -> None:
    """Wait until every service has a status."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        listed = (await api.get(SERVICE.path(NAMESPACE))).json()["items"]
        if sum("conditions" in item.get("status", {}) for item in listed) == count:
            return
        await asyncio.sleep(1.0)
    raise TimeoutError(f"not all of {count} services were reconciled in {PATIENCE_S} s")


async def all_reconciled(api: httpx.AsyncClient, metrics: str, count: int) -> None:
    """Wait until the operator has reconciled at least once for each service."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.ConnectError):  # it is still starting
            if reconciled((await api.get(metrics)).text) >= count:
                return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"not all of {count} services were reconciled in {PATIENCE_S} s")


async def service_versions(api: httpx.AsyncClient) -> dict[str, str]:
    """Return the resourceVersion of every service, by name."""
    listed = (await api.get(SERVICE.path(NAMESPACE))).json()["items"]
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in listed}


async def edit(api: httpx.AsyncClient, number: int, replicas: int) -> float:
    """Return the seconds from the API's response to an edit until the StatefulSet has the edit."""
    body = {"spec": {"pools": {"single": {"replicas": replicas}}}}
    headers = {"Content-Type": "application/merge-patch+json"}
    path = SERVICE.path(NAMESPACE, f"s{number}")
    (await api.patch(path, json=body, headers=headers)).raise_for_status()
    begun = time.perf_counter()
    path = STATEFUL_SET.path(NAMESPACE, f"s{number}-single")
    while (await api.get(path)).json()["spec"]["replicas"] != replicas:
        if time.perf_counter() - begun > PATIENCE_S:
            raise TimeoutError(f"the edit of s{number} was not applied")
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - begun


Figure = tuple[str, float, str]


async def figures(api: httpx.AsyncClient, options: argparse.Namespace) -> AsyncIterator[Figure]:
    begun = time.perf_counter()
    await create(api, options.services)
    yield "created", time.perf_counter() - begun, "s"

    with operator() as (process, metrics):
        begun = time.perf_counter()
        await all_reported(api, options.services)
        yield "reconciled from nothing", time.perf_counter() - begun, "s"
        yield "its CPU a service", 1000 * cpu_s(process) / options.services, "ms"
        await asyncio.sleep(options.settle)

    versions = await service_versions(api)
    with operator() as (process, metrics):
        begun = time.perf_counter()
        await all_reconciled(api, metrics, options.services)
        yield "reconciled after restart", time.perf_counter() - begun, "s"
        yield "its CPU a service", 1000 * cpu_s(process) / options.services, "ms"
        rewritten = versions.items() ^ (await service_versions(api)).items()
        yield "statuses written by it", len({name for name, _ in rewritten}), ""
        await asyncio.sleep(options.settle)

        before = cpu_s(process)
        await asyncio.sleep(options.seconds)
        yield "CPU at rest", 100 * (cpu_s(process) - before) / options.seconds, "% of a core"
        yield "memory", process.memory_info().rss / 2**20, "MiB"

        async for figure in edits(api, options):
            yield figure

        metrics_text = (await api.get(metrics)).text
        yield "mean reconciliation", 1000 * mean_s(metrics_text), "ms"
        yield "objects watched", watched(metrics_text), ""


async def edits(api: httpx.AsyncClient, options: argparse.Namespace) -> AsyncIterator[Figure]:
    step = max(1, options.services // options.edits)
    numbers = [number * step % options.services for number in range(options.edits)]
    took = [await edit(api, number, 1) for number in numbers]
    yield "edit to applied, median", 1000 * statistics.median(took), "ms"
    yield "edit to applied, most", 1000 * max(took), "ms"


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def reconciled(text: str) -> float:
    named = "ullage_operator_reconcile_total"
    return sum(value for name, _, value in samples(text) if name == named)


def mean_s(text: str) -> float:
    values = {name: value for name, _, value in samples(text)}
    name = "ullage_operator_reconcile_seconds"
    return values[f"{name}_sum"] / max(1.0, values[f"{name}_count"])


def watched(text: str) -> float:
    kinds = {kind.name for kind in OWNED}
    named = "ullage_operator_objects"
    return sum(value for name, labels, value in samples(text)
               if name == named and labels["kind"] in kinds)  # fmt: skip


async def run(options: argparse.Namespace) -> None:
    """Measure and print every figure."""
    with api_server():
        async with client() as api:
            print(f"{options.services} services, load average {os.getloadavg()[0]:.1f}")
            async for name, value, unit in figures(api, options):
                print(f"{name:>24}  {value:10.1f} {unit}", flush=True)


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.services = 20
        options.seconds = 3.0
        options.edits = 3
    asyncio.run(run(options))
