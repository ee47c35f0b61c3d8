"""GPUs in a real server: their figures, a driver that hangs, Xid errors, and boost off."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from ullage_testing import engine_process
from ullage_testing.fake_nvml import FakeNvml
from ullage_testing.ports import free_port

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc

TIMES = {"interval_s": 0.02, "links_every_s": 0.1, "silent_s": 2.0}
THROTTLING = {"after": 0.1, "recover_after": 0.1, "min_batch_percent": 50}


class EngineProcess:
    """A server with a fake worker on CUDA, and what it says."""

    def __init__(self, gpus: FakeNvml, folder: Path) -> None:
        self._metrics_port = free_port()
        self._log = folder / "log"
        command = engine_process.command_on_cuda(
            folder, self._metrics_port, "smollm2", THROTTLING, TIMES
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=gpus.environment | {"PYTHONPATH": ":".join(filter(None, sys.path))},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._headroom = headroom_pb2_grpc.HeadroomServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def headroom(self) -> headroom_pb2.Headroom:
        return self._headroom.GetHeadroom(headroom_pb2.GetHeadroomRequest(), timeout=10).headroom

    def metrics(self) -> dict[str, float]:
        """Samples of GPUs and of the engine by name and labels; what all have is left out."""
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        own = [line for line in lines if line.startswith(("ullage_gpu_", "ullage_engine_"))]
        constant = re.compile(r'(engine="0"|model_name="smollm2"|uuid="GPU-00000000-aaaa"),?')
        return {
            constant.sub("", name).replace(",}", "}").replace("{}", ""): float(value)
            for name, value in (line.rsplit(" ", 1) for line in own)
        }

    def messages(self) -> list[str]:
        """Messages of the log so far, the reasons of throttling beside them."""
        records = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [" ".join([each["message"], *each.get("reasons", ())]) for each in records]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, (self.metrics(), self.messages())
            assert self._process.poll() is None, self.messages()
            time.sleep(0.01)

    def end(self) -> int:
        self._channel.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=30)
        return self._process.returncode


@pytest.fixture(scope="module")
def engine(gpus: FakeNvml) -> Iterator[EngineProcess]:
    """It serves, and has seen its GPU."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as folder:
        engine = EngineProcess(gpus, Path(folder))
        engine.until(lambda: engine.headroom().ready)
        engine.until(lambda: "ullage_gpu_power_watts" in " ".join(engine.metrics()))
        yield engine
        gpus.set({"hang.nvmlDeviceGetPowerUsage": 1})  # a thread that hangs keeps nobody
        assert engine.end() == 0


@pytest.fixture
def gpu(gpus: FakeNvml, engine: EngineProcess) -> Iterator[FakeNvml]:
    """The GPU, which is well again after a test."""
    yield gpus
    gpus.reset({})
    engine.until(lambda: engine.headroom().batch_share == 1.0)


def test_figures_are_exported(engine: EngineProcess, gpu: FakeNvml) -> None:
    gpu.set({"temperature": 64, "nvlinks": 2, "nvlink_recoveries": 3, "pcie_replays": 7})
    gpu.set({"nvmlDeviceGetTotalEccErrors": 999})
    named = 'ullage_gpu_nvlink_errors_total{gpu="0",kind="recovery"}'
    engine.until(lambda: engine.metrics().get(named) == 6)
    samples = engine.metrics()
    assert samples['ullage_gpu_temperature_celsius{gpu="0"}'] == 64
    assert samples['ullage_gpu_pcie_replays_total{gpu="0"}'] == 7
    assert samples['ullage_gpu_throttled{gpu="0",reason="hw_thermal"}'] == 0
    assert samples['ullage_gpu_failed_calls_total{error="Unknown",gpu="0"}'] >= 1
    assert not any("ecc" in name for name in samples)
    assert engine.messages().count("the GPU driver fails: Unknown") == 1
    assert samples["ullage_engine_boost_off"] == samples["ullage_gpu_driver_silent"] == 0


def test_a_driver_that_hangs_stops_nothing_and_is_told(
    engine: EngineProcess, gpu: FakeNvml
) -> None:
    gpu.set({"hang.nvmlDeviceGetClockInfo": 1})
    engine.until(lambda: engine.metrics()["ullage_gpu_driver_silent"] == 1)
    assert engine.headroom().ready
    assert 'ullage_gpu_temperature_celsius{gpu="0"}' not in engine.metrics()
    gpu.set({"hang.nvmlDeviceGetClockInfo": 0})
    engine.until(lambda: engine.metrics()["ullage_gpu_driver_silent"] == 0)
    engine.until(lambda: 'ullage_gpu_temperature_celsius{gpu="0"}' in engine.metrics())
    assert any("driver does not answer" in each for each in engine.messages())
    assert "the GPU driver answers again" in engine.messages()


def test_a_driver_that_hangs_gives_boost_back(engine: EngineProcess, gpu: FakeNvml) -> None:
    gpu.set({"reasons": 0x48})
    engine.until(lambda: engine.headroom().batch_share == 0.5)
    gpu.set({"hang.nvmlDeviceGetClockInfo": 1})
    engine.until(lambda: engine.metrics()["ullage_gpu_driver_silent"] == 1)
    engine.until(lambda: engine.headroom().batch_share == 1.0)
    assert list(engine.headroom().throttle_reasons) == []


def test_xid_errors_are_counted_and_told(engine: EngineProcess, gpu: FakeNvml) -> None:
    # The GPU fell off the bus, so nothing else is known of it.
    gpu.set({"xid": 79, "xid_number": 1, "nvmlDeviceGetIndex": 15})
    name = 'ullage_gpu_xid_errors_total{gpu="0",xid="79"}'
    engine.until(lambda: engine.metrics().get(name) == 1)
    gpu.set({"xid_number": 2})
    engine.until(lambda: engine.metrics().get(name) == 2)
    assert engine.messages().count("the GPU reports Xid error 79") == 1


def test_heat_takes_boost_and_another_worker_does_not_bring_it_back(
    engine: EngineProcess, gpu: FakeNvml
) -> None:
    assert engine.headroom().max_sequences == 8
    gpu.set({"reasons": 0x48})
    engine.until(lambda: engine.headroom().batch_share == 0.5)
    report = engine.headroom()
    assert (report.max_sequences, list(report.throttle_reasons)) == (
        4,
        ["hw_slowdown", "hw_thermal"],
    )
    samples = engine.metrics()
    assert (samples["ullage_engine_boost_off"], samples["ullage_engine_batch_share"]) == (
        1,
        0.5,
    )

    kill = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
    engine.admin.InjectFault(kill, timeout=10)
    engine.until(lambda: engine.headroom().worker_restarts == 1 and engine.headroom().ready)
    engine.until(lambda: engine.headroom().batch_share == 0.5)

    gpu.set({"reasons": 0x4})  # the power limit is no heat, unless configured
    engine.until(lambda: engine.headroom().batch_share == 1.0)
    assert (engine.headroom().max_sequences, list(engine.headroom().throttle_reasons)) == (8, [])
    assert engine.metrics()["ullage_engine_boost_off"] == 0
    said = " | ".join(engine.messages())
    assert "boost off: GPUs are throttled, so fewer sequences run hw_slowdown hw_thermal" in said
    assert "boost on: GPUs are not throttled any more hw_slowdown hw_thermal" in said
