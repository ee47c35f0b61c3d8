"""`ullage verify` against a real service: a small random model with a context of 16,384 tokens."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from ullage_testing.otlp import OtlpReceiver
from ullage_testing.small_models import make_served_llama

if TYPE_CHECKING:
    Service = Any

CONTEXT = 16_384
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Bytes of one token's KV: keys and values of two layers with two heads of 16 floats."""
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def service(
    start_service: Callable[[Path], "Service"],
    tmp_path_factory: pytest.TempPathFactory,
    collector: OtlpReceiver,
) -> "Service":
    """A service whose large pool holds two requests of 12,000 tokens, and not four."""
    tracing = {"endpoint": collector.grpc_endpoint, "samplePercent": 0}
    folder = make_served_llama(tmp_path_factory.mktemp("model"), CONTEXT)
    document = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "small"},
        "spec": {
            "model": {
                "source": f"file://{folder}",
                "name": "small",
                "maxModelLen": CONTEXT,
                "dtype": "Float32",
            },
            "device": "CPU",
            "allowFaultInjection": True,
            "router": {"replicas": 1},
            "pools": {
                "single": {"gpus": 1, "memory": {"maxKV": 16_000 * TOKEN_BYTES}},
                "large": {
                    "role": "Large",
                    "gpus": 1,
                    "parallelism": {"tensor": 1, "pipeline": 1},
                    "memory": {"maxKV": 30_000 * TOKEN_BYTES},
                },
            },
            "memory": {"deviceBytes": "1500Mi", "safetyReserve": "32Mi"},
            "slo": {"ttftP95": "60s", "e2eP95": "120s"},
            "observability": {"tracing": tracing},
        },
    }
    path = tmp_path_factory.mktemp("manifest") / "small.yaml"
    path.write_text(yaml.safe_dump(document))
    return start_service(path)


def verify(service: "Service", folder: Path, scenario: str, *options: str) -> dict[str, Any]:
    """Run the command, and return its report. Nothing may have failed."""
    path = folder / "report.json"
    command = [sys.executable, "-m", "ullage_cli.main", "verify", scenario, service.http_url]
    done = subprocess.run(
        [*command, "--json", str(path), *options], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(path.read_text()))


def test_streams(service: "Service", tmp_path: Path) -> None:
    report = verify(service, tmp_path, "streams")
    assert (report["passed"], report["skipped"]) == (7, 0)


def test_faults_end_processes_of_the_service(service: "Service", tmp_path: Path) -> None:
    before = psutil.Process(service.process.pid).children(recursive=True)
    report = verify(service, tmp_path, "inject", "--pid", str(service.process.pid))
    assert report["failed"] == 0
    assert {each["name"] for each in report["criteria"]} >= {
        "SIGKILL of the busiest process: the same words",
        "SIGSTOP of the busiest process: the same words",
    }
    # A worker, or its server, which computes as much with so small a model.
    assert not all(each.is_running() for each in before)


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
def test_a_soak_of_two_minutes(service: "Service", tmp_path: Path) -> None:
    """Four conversations: all answers are whole and in time, and no process grows."""
    pid = str(service.process.pid)
    report = verify(service, tmp_path, "soak", "--minutes", "2", "--pid", pid)
    verdicts = {each["name"].partition(" (")[0]: each["verdict"] for each in report["criteria"]}
    assert verdicts == dict.fromkeys(
        (
            "every answer of 2 minutes ends well",
            "p95 of all answers",
            "growth of the server's memory",
            "allocated share of the device's memory",
        ),
        "passed",
    )


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
def test_everything(service: "Service", tmp_path: Path) -> None:
    """Among it four prompts of 12,000 tokens at once, with 1,000 tokens in each answer."""
    report = verify(service, tmp_path, "all", "--minutes", "0.5")
    names = {each["name"]: each for each in report["criteria"]}
    assert "4 x 12000 tokens at once, 1000 in each answer" in names
    assert names["/stats shows the route of large prompts"]["verdict"] == "passed"
    assert names["/stats names the trace of each large prompt"]["verdict"] == "passed"
    skipped = {name for name, each in names.items() if each["verdict"] == "skipped"}
    assert skipped <= {
        "a long prompt to each adapter",
        "faults",
        "most refused clients are accepted when they return",
    }
