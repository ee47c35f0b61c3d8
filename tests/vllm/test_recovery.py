"""An engine whose worker computes with vLLM: whatever happens to the worker, every stream goes on
as it would have gone on undisturbed. How long that takes is printed, as `pytest -rP` shows it.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.cgroup import make_container
from ullage_testing.ports import free_port
from ullage_testing.small_models import SOURCE

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

PATIENCE_S = 300.0
PROMISED_S = 30.0
BLOCK_BYTES = 128 * 46_080
"""KV of a block of 128 tokens: 30 layers of SmolLM2 have 3 heads of 64 keys and values each."""
LENGTH = 64
PROMPT = [504, 1296, 3995, 4199, 282, 7158, 359]  # "The three largest cities of Italy are"
BUSY = "busy in a step without an end"
HANDLERS = '''
"""Makes workers with vLLM end, fail and hang inside whatever they compute, by signals."""

import os, signal, sys, time

def fail(number, frame):
    raise RuntimeError("an error inside a step")

def spin(number, frame):
    while True:
        pass

def take_memory(number, frame):
    import torch
    torch.empty(1 << 30, dtype=torch.uint8)

if "ullage_engine.vllm_worker" in sys.orig_argv:
    signal.signal(signal.SIGVTALRM, lambda number, frame: os._exit(0))
    signal.signal(signal.SIGUSR2, fail)
    signal.signal(signal.SIGURG, take_memory)
    signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(3600))
    signal.signal(signal.SIGPROF, spin)
'''


def ask(
    stop: dict[str, Any] | None = None, samples: int = 1, regex: str = "", **sampling: Any
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(**sampling),
        stop=pb.StopConditions(max_tokens=LENGTH, ignore_eos=not regex, **(stop or {})),
        output=pb.OutputOptions(return_token_ids=True),
        samples=pb.Samples(n=samples),
    )
    if regex:
        request.grammar.regex = regex
    return request


REQUESTS = (
    ask(temperature=0.0),
    ask(temperature=0.0, stop={"stop_token_ids": [30]}),
    ask(temperature=0.0, frequency_penalty=0.5),
    ask(temperature=1.0, seed=5, top_p=0.95),
    ask(temperature=0.8, seed=6, presence_penalty=1.0, min_p=0.02),
    ask(temperature=0.9, seed=7, samples=2),
    ask(temperature=1.0, seed=8, regex="[a-z ]{40,60}"),
    ask(temperature=0.0, stop={"stop_strings": [" Milan"]}),
)


@dataclass
class Answer:
    """What a client has of one stream."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    end: int = 0


class Streams:
    """All requests at once."""

    def __init__(self, target: str) -> None:
        self.times: list[float] = []
        """When something came."""
        self._started = [threading.Event() for _ in REQUESTS]
        self._channel = grpc.insecure_channel(target)
        self._pool = ThreadPoolExecutor(len(REQUESTS))
        self._answers = [
            self._pool.submit(self._follow, request, started)
            for request, started in zip(REQUESTS, self._started, strict=True)
        ]

    def _follow(self, request: pb.GenerateRequest, started: threading.Event) -> Answer:
        answer = Answer()
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        for response in stub.Generate(request, timeout=PATIENCE_S):
            if response.HasField("delta"):
                delta = response.delta
                self.times.append(time.monotonic())
                answer.tokens.setdefault(delta.sample, []).extend(delta.token_ids)
                answer.texts[delta.sample] = answer.texts.get(delta.sample, "") + delta.text
                if sum(map(len, answer.tokens.values())) >= 4:
                    started.set()
            if response.HasField("finished"):
                answer.end = int(response.finished.reason)
        return answer

    def wait_started(self) -> None:
        """Waits until each has a few tokens."""
        assert all(each.wait(PATIENCE_S) for each in self._started)

    def end(self) -> list[Answer]:
        answers = [each.result(PATIENCE_S) for each in self._answers]
        self._pool.shutdown()
        self._channel.close()
        return answers


@dataclass
class Engine:
    """A server with its worker."""

    process: subprocess.Popen[bytes]
    target: str
    metrics_url: str
    folder: Path

    @property
    def num_ooms(self) -> float:
        with urllib.request.urlopen(self.metrics_url) as response:
            text = response.read().decode()
        return float(re.search(r"^ullage_oom_events_total\{.*\} (\S+)$", text, re.M)[1])

    @property
    def headroom(self) -> headroom_pb2.Headroom:
        with grpc.insecure_channel(self.target) as channel:
            stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
            return stub.GetHeadroom(headroom_pb2.GetHeadroomRequest()).headroom

    @property
    def worker(self) -> int:
        """Process id of the worker; 0 between two."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if "ullage_engine.vllm_worker" in child.cmdline():
                    return int(child.pid)
        return 0

    def wait_serving(self) -> None:
        request = health_pb2.HealthCheckRequest(service="readiness")
        with grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def serves() -> bool:
                assert self.process.poll() is None, (self.folder / "log").read_text()[-4000:]
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(request, wait_for_ready=True, timeout=1.0)
                    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
                return False

            wait_until(serves)

    def inject_oom(self) -> None:
        with grpc.insecure_channel(self.target) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).InjectFault(
                admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM), timeout=PATIENCE_S
            )

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.worker, number)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, weights_dir: Path
) -> Iterator[Engine]:
    """An engine in float32; the parameter is whether it has a worker that stands by."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "sitecustomize.py").write_text(HANDLERS)
    grpc_port = free_port()
    metrics_port = free_port()
    config = {
        "engine": "vllm",
        "model": {"source": SOURCE, "name": "m", "dtype": "float32", "max_model_len": 1024},
        "device": "cpu",
        "memory": {
            "device_bytes": 4 << 30,
            "safety_reserve": 0,
            "max_kv": 256 << 20,
            "tiers": {"host": {"size": 32 << 20}},
        },
        "batching": {"max_sequences": 16},
        "limits": {"request_timeout": PATIENCE_S, "step_deadline": 120.0},
        "server": {
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "run_dir": str(folder),
            "weights_dir": str(weights_dir),
            "standby_worker": request.param,
            "allow_fault_injection": True,
        },
    }
    (folder / "engine.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ullage_engine.main", "--config", str(folder / "engine.yaml")]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONPATH": path})
    metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
    running = Engine(process, f"127.0.0.1:{grpc_port}", metrics_url, folder)
    try:
        running.wait_serving()
        yield running
    finally:
        process.terminate()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[Answer]:
    return Streams(engine.target).end()


def spin(engine: Engine) -> None:
    """Have the worker compute without an end, until the server ends it."""
    log = engine.folder / "log"
    before = log.read_text().count(BUSY)
    engine.signal(signal.SIGPROF)
    # The deadline is far away: what the worker measured at its start decides.
    wait_until(lambda: log.read_text().count(BUSY) > before)


FAULTS: dict[str, Callable[[Engine], None]] = {
    "killed": lambda engine: engine.signal(signal.SIGKILL),
    "stopped": lambda engine: engine.signal(signal.SIGSTOP),
    "out of memory": Engine.inject_oom,
    "error in a step": lambda engine: engine.signal(signal.SIGUSR2),
    "exit with status 0": lambda engine: engine.signal(signal.SIGVTALRM),
    "hung in a step": lambda engine: engine.signal(signal.SIGALRM),
    "busy in a step": spin,
}


@pytest.mark.parametrize(
    ("engine", "fault"),
    [*((False, fault) for fault in FAULTS.values()), (True, FAULTS["killed"])],
    ids=[*FAULTS, "killed beside a standby"],
    indirect=["engine"],
)
def test_eight_streams_go_on_the_same(
    engine: Engine, undisturbed: list[Answer], fault: Callable[[Engine], None]
) -> None:
    engine.wait_serving()
    streams = Streams(engine.target)
    before = engine.worker
    streams.wait_started()
    struck_at = time.monotonic()
    fault(engine)
    wait_until(lambda: engine.worker not in (0, before))
    started_at = time.monotonic()
    assert streams.end() == undisturbed
    resumed_at = next(each for each in streams.times if each > started_at)
    print(
        f"a new worker after {started_at - struck_at:.1f} s, "
        f"a new token after {resumed_at - struck_at:.1f} s"
    )


@pytest.mark.parametrize("engine", [False], ids=["killed"], indirect=True)
def test_what_was_computed_is_not_computed_again_after_a_kill(engine: Engine) -> None:
    prompt = [(11 * each * each + 5) % 40_000 + 100 for each in range(2 * 128 + 9)]
    request = ask(temperature=0.0)
    request.token_ids.ids[:] = prompt
    request.session_id = "s"
    engine.wait_serving()
    tokens, _ = answer_of(engine, request)
    before = engine.worker
    engine.signal(signal.SIGKILL)
    wait_until(lambda: engine.worker not in (0, before))
    engine.wait_serving()
    tokens_again, usage = answer_of(engine, request)
    assert tokens_again == tokens
    assert [(each.tier, each.tokens) for each in usage.cached_by_tier] == [("host", 2 * 128)]
    assert usage.cached_tokens == 2 * 128


def answer_of(engine: Engine, request: pb.GenerateRequest) -> tuple[list[int], pb.Usage]:
    tokens: list[int] = []
    with grpc.insecure_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for response in stub.Generate(request, timeout=PATIENCE_S):
            tokens += response.delta.token_ids
            if response.HasField("finished"):
                return tokens, response.finished.usage
    raise AssertionError("the stream has no end")


def survive(engine: Engine, undisturbed: list[Answer], exhaust: Callable[[], None]) -> None:
    """Exhaust memory under streams: they go on soon and the same, and it is counted once."""
    engine.wait_serving()
    wait_until(lambda: is_idle(engine.headroom))
    whole = engine.headroom
    num_ooms = engine.num_ooms
    streams = Streams(engine.target)
    before = engine.worker
    streams.wait_started()
    struck_at = time.monotonic()
    exhaust()
    assert streams.end() == undisturbed
    assert engine.worker != before
    assert engine.num_ooms == num_ooms + 1

    # A start after a shortage takes an eighth of the KV pool less (docs/guide/vllm.md), in whole
    # blocks.
    wait_until(lambda: is_idle(engine.headroom))
    least = whole.headroom_bytes - whole.kv_pool_bytes / 8 - 2 * BLOCK_BYTES
    assert engine.headroom.headroom_bytes >= least

    times = sorted(streams.times)
    pause_s = max(b - max(a, struck_at) for a, b in pairwise(times) if b > struck_at)
    assert pause_s < promised_s()
    print(f"streams paused for {pause_s:.1f} s")


@pytest.mark.parametrize("engine", [False], ids=["limited"], indirect=True)
def test_a_worker_that_gets_no_more_memory_costs_a_pause(
    engine: Engine, undisturbed: list[Answer]
) -> None:
    def exhaust() -> None:
        pid = engine.worker
        size = psutil.Process(pid).memory_info().vms + (64 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        engine.signal(signal.SIGURG)  # it asks for more than that, wherever it is

    survive(engine, undisturbed, exhaust)


@pytest.mark.parametrize("engine", [False], ids=["container"], indirect=True)
def test_another_process_that_takes_the_containers_memory_costs_a_pause(
    engine: Engine, undisturbed: list[Answer]
) -> None:
    with make_container() as container:
        container.take(engine.process.pid)
        # Memory is the container's from the next worker on.
        before = engine.worker
        engine.signal(signal.SIGKILL)
        wait_until(lambda: engine.worker not in (0, before))

        def exhaust() -> None:
            pid = engine.worker
            container.leave_free(128 << 20)
            with container.hog([pid]):
                wait_until(lambda: container.num_kills > 0 and not psutil.pid_exists(pid))

        survive(engine, undisturbed, exhaust)


def is_idle(report: headroom_pb2.Headroom) -> bool:
    return report.ready and not report.requests_running and not report.requests_waiting


def promised_s() -> float:
    """Return the promise, longer on a machine on which more wants to run than has cores."""
    one_minute, *_ = os.getloadavg()
    return PROMISED_S * max(1.0, one_minute / (os.cpu_count() or 1))
