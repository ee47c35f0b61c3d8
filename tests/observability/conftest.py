"""A live service under load, an operator, and what a DCGM exporter says, read by one Prometheus."""

import concurrent.futures
import contextlib
import copy
import functools
import http.server
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, Operator, World, login, read_crd, until
from ullage_testing.alerts import firing
from ullage_testing.local_service import Service, services

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.monitoring import rule_groups

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "ullage" / "files" / "rules"
NAMESPACE = "models"
NAME = "observed"
MODEL = "smollm2-135m"
TEXT = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "


@pytest.fixture(scope="session")
def local_prometheus() -> ModuleType:
    return importlib.import_module("benchmarks.support.prometheus")


@pytest.fixture(scope="session")
def manifest() -> dict[str, Any]:
    """One engine with little memory, so that a few requests fill it, and a short queue."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    document["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    spec = document["spec"]
    spec["model"]["maxModelLen"] = 1024
    spec["pools"] = {"single": {"gpus": 1, "memory": {"maxKV": "24Mi"}}}
    spec["memory"]["tiers"] = {"host": {"size": "128Mi"}}
    spec["routing"] = {"queue": {"maxRequests": 2, "timeout": "120s"}}
    spec["slo"] = {"ttftP95": "300s", "e2eP95": "300s"}
    return document


@pytest.fixture(scope="session")
def service(
    manifest: dict[str, Any],
    program: str,
    tmp_path_factory: pytest.TempPathFactory,
    weights_dir: Path,
) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("observed") / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with services(tmp_path_factory, weights_dir) as start:
        yield start(path)


@pytest.fixture(scope="session")
def program(local_prometheus: ModuleType) -> str:
    found: str | None = local_prometheus.find()
    if found is None:
        pytest.skip("no prometheus: run tests/charts/get_prometheus.py, or set ULLAGE_PROMETHEUS")
    return found


@contextlib.contextmanager
def new_world(folder: Path) -> Iterator[World]:
    """An API server of its own, which serves the definition of LLMService."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(running(bookmark_interval=1.0))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("KUBECONFIG", str(api.kubeconfig(folder)))
        client = stack.enter_context(httpx.Client(**login(), timeout=60))
        client.post("/api/v1/namespaces", json={"metadata": {"name": NAMESPACE}})
        client.post(CRDS, json=read_crd()).raise_for_status()
        world = World(client, NAMESPACE, api.kubeconfig(folder), api)
        until(lambda: client.get(world.services).status_code == 200, "the definition is served")
        yield world


@pytest.fixture
def world(program: str, tmp_path: Path) -> Iterator[World]:
    """An API server of the test's own."""
    with new_world(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def operator_port(
    program: str, manifest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """Where an operator tells its metrics that has reconciled a service in an API server."""
    folder = tmp_path_factory.mktemp("operator")
    with new_world(folder) as world:
        operator = Operator(world, folder / "log", False)
        try:
            world.create().raise_for_status()
            until(operator.reconciled, "the service is reconciled")
            yield operator.metrics
        finally:
            operator.stop()


@pytest.fixture(scope="session")
def exporter_port() -> Iterator[int]:
    """Serves what exporters say of two GPUs: one of 4.8 with the old names, one of 4.9."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (Path(__file__).parent / f"dcgm{self.path}.prom").read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def job(name: str, address: str, path: str = "/metrics", **labels: str) -> dict[str, Any]:
    targets = [{"targets": [address], "labels": labels}]
    return {
        "job_name": name,
        "metrics_path": path,
        "static_configs": targets,
        "honor_labels": True,
    }


def address(url: str) -> str:
    return url.split("//")[1].split("/")[0]


@pytest.fixture(scope="session")
def prometheus(
    local_prometheus: ModuleType,
    program: str,
    service: Service,
    manifest: dict[str, Any],
    operator_port: int,
    exporter_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Has scraped everything before, between and after two rounds of requests."""
    whose = {"namespace": NAMESPACE, "llmservice": NAME}
    [engine] = service.state["engines"]
    router = f"{NAME}-router-6c9f8d7b5-x2x4z"
    exporter = f"127.0.0.1:{exporter_port}"
    jobs = [
        job("router", address(service.state["metrics_url"]), pod=router, **whose),
        job("engine", address(engine["metrics_url"]), pod=f"{NAME}-single-0", **whose),
        job(
            "operator",
            f"127.0.0.1:{operator_port}",
            pod="ullage-operator-0",
            namespace="ullage-system",
        ),
        job("dcgm", exporter, "/4.8"),
        job("dcgm-4.9", exporter, "/4.9"),
    ]
    groups = chart_groups() + rule_groups(parse(manifest), Settings())
    folder = tmp_path_factory.mktemp("prometheus")
    with local_prometheus.running(program, folder, jobs, groups, seconds=2.0) as started:
        until(lambda: len(started.query("up == 1")) == len(jobs), "all is scraped")
        for _ in range(2):
            seen = started.query("sum(ullage_router_requests_total)") or [{"value": [0, "0"]}]
            told = seen[0]["value"][1]
            send_requests(service)
            until(functools.partial(has_grown, started, float(told)), "the requests are scraped")
        yield started


def chart_groups() -> list[dict[str, Any]]:
    """The groups of rules that the chart installs."""
    documents = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yaml"))]
    return [group for document in documents for group in document["groups"]]


@pytest.fixture(scope="session")
def rules_of_operator() -> list[dict[str, Any]]:
    return [group for group in chart_groups() if group["name"] == "ullage-operator"]


Observe = Callable[..., contextlib.AbstractContextManager[Any]]
Watch = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture
def observe(local_prometheus: ModuleType, program: str, tmp_path: Path) -> Observe:
    """observe(jobs, groups, windows): a Prometheus whose alerts fire at once, not after minutes.

    `windows` maps durations in the rules' queries to shorter ones.
    """

    def start(
        jobs: list[dict[str, Any]],
        groups: list[dict[str, Any]],
        windows: Mapping[str, str] | None = None,
    ) -> Any:
        at_once = [
            group | {"rules": [hurried(rule, windows or {}) for rule in group["rules"]]}
            for group in groups
        ]
        folder = tmp_path / "prometheus"
        folder.mkdir()
        return local_prometheus.running(program, folder, jobs, at_once, seconds=1.0)

    return start


def hurried(rule: dict[str, Any], windows: Mapping[str, str]) -> dict[str, Any]:
    """Return a rule that does not wait, and whose query covers other windows."""

    def other(duration: re.Match[str]) -> str:
        return windows.get(duration[0], duration[0])

    query = re.sub(r"(?<=\[)\w+(?=\])|(?<= offset )\w+", other, rule["expr"])
    return {name: value for name, value in rule.items() if name != "for"} | {"expr": query}


@pytest.fixture
def watch(observe: Observe, service: Service, manifest: dict[str, Any]) -> Watch:
    """watch(slo, windows): a Prometheus that reads the service, and judges it by objectives."""
    meta = manifest["metadata"]
    name = meta["name"]
    whose = {"namespace": meta["namespace"], "llmservice": name}
    pods = {f"{name}-router-6c9f8d7b5-x2x4z": service.state["metrics_url"]}
    for number, engine in enumerate(service.state["engines"]):
        pods[f"{name}-single-{number}"] = engine["metrics_url"]
    targets = [
        {"targets": [address(url)], "labels": {**whose, "pod": pod}} for pod, url in pods.items()
    ]
    jobs = [{"job_name": "pods", "static_configs": targets, "honor_labels": True}]

    @contextlib.contextmanager
    def start(
        slo: dict[str, str] | None = None, windows: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        judged = copy.deepcopy(manifest)
        judged["spec"]["slo"] = slo or judged["spec"]["slo"]
        groups = rule_groups(parse(judged), Settings())
        with observe(jobs, groups, windows) as prometheus:
            scraped = functools.partial(prometheus.query, "up == 1")
            until(lambda: len(scraped()) == len(targets), "all is scraped")
            until(lambda: "UllageServiceAbsent" not in firing(prometheus), "the router is seen")
            yield prometheus

    return start


def has_grown(prometheus: Any, before: float) -> bool:
    """Whether all requests of a round are in what was scraped, which is then at rest."""
    found = prometheus.query(
        f"sum(ullage_router_requests_total) > {before} and on() "
        "(sum(ullage_router_inflight_requests) == 0) and on() "
        "(sum(changes(ullage_generation_tokens_total[5s])) == 0)"
    )
    return bool(found)


def send_requests(service: Service) -> None:
    """Sends what is answered, refused, streamed, left early, and found in a cache."""
    url = f"{service.http_url}/v1/completions"
    with httpx.Client(timeout=120, trust_env=False) as client:

        def ask(text: str, tokens: int, leave_after: int = 0) -> int:
            body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "ignore_eos": True}
            with client.stream("POST", url, json=body | {"stream": True}) as answer:
                for number, line in enumerate(answer.iter_lines()):
                    if leave_after and line.startswith("data:") and number > leave_after:
                        return 499
                return answer.status_code

        def all_at_once(*calls: Callable[[], int]) -> list[int]:
            with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
                return [each.result() for each in [pool.submit(call) for call in calls]]

        shared = TEXT * 12
        assert ask(shared, 8) == 200
        assert ask(shared + "Again.", 8) == 200
        assert ask(shared + "And yet.", 200, leave_after=6) == 499
        statuses = all_at_once(*(functools.partial(ask, f"{n}. {TEXT * 14}", 32) for n in range(6)))
        assert {*statuses} == {200, 429}, json.dumps(statuses)
        # As much as the device has room for, so that the text comes back from host memory.
        for number in range(4):
            assert ask(f"{number}, then. {TEXT * 14}", 2) == 200
        assert ask(shared + "At last.", 8) == 200
