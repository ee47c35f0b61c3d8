"""Alerts about a service fire when the fault that they are about is made on real processes."""

import contextlib
import copy
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from ullage_kubeapi.trial import Operator, World, until
from ullage_testing.alerts import firing, make
from ullage_testing.local_service import Service, services
from ullage_testing.repeating import repeating

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

pytestmark = pytest.mark.timeout(1200)

MODEL = "smollm2-135m"
TEXT = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "
LONG_S = 300.0
"""What nothing takes on an idle machine; other tests may keep its cores busy."""
SHORTER = {"5m": "20s"}
"""A window of the rules, and the shorter one in which a test makes as much happen."""
NEVER_MET = {"ttftP95": "5ms", "e2eP95": "5ms"}


@pytest.fixture(scope="module")
def manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Two engines with a short queue, which send fewer tokens than people read."""
    document = copy.deepcopy(manifest)
    spec = document["spec"]
    spec["allowFaultInjection"] = True
    spec["pools"]["single"] |= {"replicas": 2, "memory": {"maxKV": "64Mi"}}
    spec["streaming"] = {"tokensPerSecond": 3}
    spec["routing"]["placement"] = {"affinity": {"maxExtraLoad": 0}}
    return document


@pytest.fixture(scope="module")
def service(
    manifest: dict[str, Any],
    program: str,
    tmp_path_factory: pytest.TempPathFactory,
    weights_dir: Path,
) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("faults") / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with services(tmp_path_factory, weights_dir) as start:
        yield start(path)


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(
        base_url=service.http_url, timeout=LONG_S, trust_env=False, limits=limits
    ) as made:
        yield made


def ask(client: httpx.Client, prompt: str, max_tokens: int = 6) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for _ in answer.iter_bytes():
            pass
        return answer.status_code


def generate(engine: dict[str, Any]) -> None:
    """Lets an engine generate, past the router."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=list(range(100, 110))),
        stop=pb.StopConditions(max_tokens=200, ignore_eos=True),
    )
    with grpc.insecure_channel(engine["grpc_target"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in stub.Generate(request, timeout=LONG_S, wait_for_ready=True):
            pass


@contextlib.contextmanager
def busy_node() -> Iterator[None]:
    """More processes that only compute than the machine has cores."""
    command = [sys.executable, "-c", "import os\nos.nice(19)\nwhile True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield


def test_one_engine_has_all_the_load_and_the_node_is_busy(
    service: Service, watch: Callable[..., Any]
) -> None:
    call = functools.partial(generate, service.state["engines"][0])
    with repeating(call, 8), busy_node(), watch(windows=SHORTER) as prometheus:
        expected = {"UllageEnginesUneven", "UllageCPUShort"}
        until(lambda: expected <= firing(prometheus), f"{expected} fire", LONG_S)
        [uneven] = prometheus.query('ALERTS{alertname="UllageEnginesUneven",measure="requests"}')
        assert uneven["metric"]["pool"] == "single"


def test_answers_are_later_and_slower_than_promised(
    client: httpx.Client, watch: Callable[..., Any]
) -> None:
    def load() -> None:
        for number in range(4):
            assert ask(client, f"{number}. {TEXT}") == 200
        # Requests of no effect, since alerts about shares want many.
        refused = [client.post("/v1/completions", json={"model": MODEL}) for _ in range(1100)]
        assert {each.status_code for each in refused} == {400}

    late = ("UllageServiceFirstTokenLate", "UllageServiceLate", "UllageServiceTailLate")
    budgets = ("UllageBudgetBurnsFast", "UllageBudgetBurnsSlowly")
    with watch(NEVER_MET) as prometheus:
        make(load, prometheus, *late, *budgets, "UllageStreamsSlow")


def test_more_requests_than_engines_have_room_for(
    client: httpx.Client, watch: Callable[..., Any]
) -> None:
    call = functools.partial(ask, client, TEXT * 14, 8)
    with watch() as prometheus, contextlib.ExitStack() as stack:
        make(
            lambda: stack.enter_context(repeating(call, 32)),
            prometheus,
            *("UllageHeadroomExhausted", "UllageQueueSaturated"),
        )


def test_an_engine_hangs(service: Service, watch: Callable[..., Any]) -> None:
    pid = service.state["engines"][1]["pid"]
    with watch() as prometheus:
        try:
            make(lambda: os.kill(pid, signal.SIGSTOP), prometheus, "UllageEnginesStale")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_workers_end_and_memory_ends(service: Service, watch: Callable[..., Any]) -> None:
    engine = service.state["engines"][0]
    channel = grpc.insecure_channel(engine["grpc_target"])
    fault = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM)

    def run_out_of_memory() -> None:
        admin_pb2_grpc.AdminServiceStub(channel).InjectFault(fault)
        generate(engine)

    def kill_workers() -> None:
        for _ in range(4):
            worker = until(functools.partial(worker_of, engine["pid"]), "a worker runs", LONG_S)
            worker.kill()
            until(lambda worker=worker: worker_of(engine["pid"]) != worker, "it is gone")

    with channel, watch() as prometheus:
        make(run_out_of_memory, prometheus, "UllageEngineOutOfMemory")
        make(kill_workers, prometheus, "UllageWorkersRestart")


def worker_of(pid: int) -> psutil.Process | None:
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "ullage_engine.worker.main" in child.cmdline():
                return child
    return None


def test_routers_run_and_an_operator_sees_no_service(
    world: World,
    service: Service,
    observe: Any,
    rules_of_operator: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    operator = Operator(world, tmp_path / "log", False)
    targets = [f"127.0.0.1:{operator.metrics}", service.state["metrics_url"].split("/")[2]]
    label = {"namespace": "ullage-system"}
    job = {"job_name": "all", "static_configs": [{"targets": targets, "labels": label}]}
    try:
        with observe([job], rules_of_operator) as prometheus:
            until(lambda: firing(prometheus) == {"UllageOperatorBlind"}, "it alone fires")
    finally:
        operator.stop()


def test_engines_are_lost_and_then_the_router(
    service: Service, client: httpx.Client, watch: Callable[..., Any]
) -> None:
    router = service.state["router"]["pid"]

    def lose_engines() -> None:
        for engine in service.state["engines"]:
            server = psutil.Process(engine["pid"])
            for process in [server, *server.children(recursive=True)]:
                process.kill()

    def ask_on() -> None:
        ask(client, TEXT)
        time.sleep(0.1)

    with watch() as prometheus:
        with repeating(ask_on, 4):
            make(lose_engines, prometheus, "UllageServiceErrors")
        try:
            make(lambda: os.kill(router, signal.SIGSTOP), prometheus, "UllageServiceAbsent")
        finally:
            os.kill(router, signal.SIGCONT)
