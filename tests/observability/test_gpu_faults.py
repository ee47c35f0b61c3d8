"""Alerts about GPUs fire when a real engine's server meets GPUs that are hot or do not answer.

The driver's library is a small one that tests compile, and the worker that computes is fake.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ullage_kubeapi.trial import until
from ullage_testing import engine_process
from ullage_testing.alerts import firing, make
from ullage_testing.fake_nvml import FakeNvml, compile_library
from ullage_testing.local_service import end
from ullage_testing.ports import free_port

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.monitoring import rule_groups

TIMES = {"interval_s": 0.1, "links_every_s": 1.0, "silent_s": 2.0}
THROTTLING = {"after": 0.5, "recover_after": 0.5, "min_batch_percent": 50}
HOT = 0x48
"""Bits of NVML for clocks that heat lowers: hardware slowdown and its thermal part."""


@pytest.fixture
def gpus(tmp_path: Path) -> FakeNvml:
    compile_library(tmp_path)
    return FakeNvml(tmp_path, tmp_path / "gpus")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def prometheus(
    gpus: FakeNvml,
    observe: Callable[..., Any],
    manifest: dict[str, Any],
    run_dir: Path,
    tmp_path: Path,
) -> Iterator[Any]:
    """Has scraped an engine that has seen its GPUs."""
    port = free_port()
    command = engine_process.command_on_cuda(run_dir, port, "smollm2-135m", THROTTLING, TIMES)
    environment = gpus.environment | {"PYTHONPATH": ":".join(filter(None, sys.path))}

    meta = manifest["metadata"]
    labels = {"namespace": meta["namespace"], "pod": f"{meta['name']}-single-0"}
    target = {"targets": [f"127.0.0.1:{port}"], "labels": labels}
    job = {"job_name": "engine", "static_configs": [target], "honor_labels": True}
    groups = rule_groups(parse(manifest), Settings())
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))
        engine = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        stack.callback(end, engine)
        started = stack.enter_context(observe([job], groups))
        seen = "ullage_gpu_temperature_celsius"
        until(lambda: started.query(seen), "the engine has seen its GPU")
        yield started


@pytest.mark.parametrize(
    ("alert", "entry", "faulty"),
    [
        ("UllageBoostOff", "reasons", HOT),
        ("UllageGPUDriverSilent", "hang.nvmlDeviceGetClockInfo", 1),
    ],
)
def test_a_fault_of_a_gpu_fires_its_alert(
    prometheus: Any, gpus: FakeNvml, alert: str, entry: str, faulty: int
) -> None:
    make(lambda: gpus.set({entry: faulty}), prometheus, alert)
    [fired] = prometheus.query(f'ALERTS{{alertname="{alert}"}}')
    assert fired["metric"]["pod"].endswith("-single-0")
    gpus.set({entry: 0})
    until(lambda: alert not in firing(prometheus), "it is clear again")
