"""What NVIDIA's bindings say of GPUs whose library these tests compile."""

import json
import subprocess
import sys

import pytest
from ullage_testing.fake_nvml import FakeNvml

PROGRAM = """
import dataclasses, json, os, sys
from ullage_engine.gpu.nvml import Nvml, NvmlUnavailableError
try:
    for visible in json.loads(sys.argv[1]):
        own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        for gpu in Nvml().gpus(own, 2):
            sample = dataclasses.asdict(gpu.sample(with_links=True))
            print(json.dumps(sample | {"visible": visible}, default=sorted))
except NvmlUnavailableError as error:
    print(json.dumps({"unavailable": str(error)}))
"""


PROCESSES = """
import json, os
from ullage_engine.gpu.nvml import Nvml
[gpu] = Nvml().gpus(os.environ, 1)
own = gpu.process_bytes()
print(json.dumps({"memory": gpu.free_and_total_bytes(), "own": own.pop(os.getpid(), None),
                  "others": own}))
"""


def processes(gpus: FakeNvml) -> dict[str, object]:
    """What the first GPU's driver says of the processes on it, asked by one of them."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES],
        env=gpus.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def ask(gpus: FakeNvml, *visible: str | None) -> list[dict[str, object]]:
    """Samples of the first two GPUs under each value of CUDA_VISIBLE_DEVICES."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(visible)]
    done = subprocess.run(
        command, env=gpus.environment, capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def gpus(gpus: FakeNvml) -> FakeNvml:
    """Three GPUs, each time anew."""
    gpus.reset({"gpus": 3})
    return gpus


def test_everything_comes_in_base_units_and_what_a_gpu_lacks_is_none(gpus: FakeNvml) -> None:
    gpus.set({"reasons": 0x4 | 0x40 | 0x1, "nvlinks": 4, "nvlink_down": 2, "nvlink_replays": 5})
    gpus.set({"1.temperature": 91, "ecc_errors": 2, "uncorrected_rows": 1, "remap_pending": 1})
    gpus.set({"1.nvmlDeviceGetPowerUsage": 15, "nvmlDeviceGetUtilizationRates": 3})
    first, second = ask(gpus, None)
    assert first == {
        "index": "0",
        "uuid": "GPU-00000000-aaaa",
        "memory_total_bytes": 80_000_000_000,
        "memory_used_bytes": 40_000_000_000,
        "memory_free_bytes": 39_400_000_000,
        "memory_reserved_bytes": 600_000_000,
        "power_watts": 312.5,
        "power_limit_watts": 700.0,
        "temperature_celsius": 55.0,  # of a driver without nvmlDeviceGetTemperatureV
        "sm_clock_hertz": 1.98e9,
        "memory_clock_hertz": 2.619e9,
        "utilization_ratio": None,
        "memory_utilization_ratio": None,
        "throttle_reasons": ["hw_thermal", "power_cap"],
        "ecc_uncorrected_errors": 2,
        "remapped_rows": {"corrected": 0, "uncorrected": 1},
        "row_remap_pending": 1,
        "row_remap_failed": 0,
        "nvlinks_active": 3,
        "nvlink_errors": {"replay": 15, "recovery": 0},
        "pcie_replays": 0,
        "failed_calls": {},
        "visible": None,
    }
    assert second["temperature_celsius"] == 91.0
    assert (second["power_watts"], second["failed_calls"]) == (None, {"GpuIsLost": 1})


@pytest.mark.parametrize(
    ("driver", "errors"),
    [
        # Hopper: fields of each link, and old counters that are empty.
        (
            {"field.161": 5, "field.161.1": 6, "field.162": 1, "field.163": 0},
            {"replay": 16, "recovery": 3, "crc": 0},
        ),
        (
            {"field.161": 5, "field.162": 1, "nvmlDeviceGetNvLinkErrorCounter": 3},
            {"replay": 15, "recovery": 3},
        ),
        ({"field.161": 5, "field_type": 1}, {"replay": 15, "recovery": 0}),
        ({"field.161": 5, "field_type": 0}, {"replay": 15, "recovery": 0}),
        # Blackwell counts recoveries, and nothing else that is here.
        ({"field.215": 2, "nvmlDeviceGetNvLinkErrorCounter": 3}, {"recovery": 6}),
        # Ampere: fields that are absent or zero, and old counters.
        ({"nvlink_replays": 4}, {"replay": 12, "recovery": 0}),
        ({"nvlink_replays": 4, "field.161": 0}, {"replay": 12, "recovery": 0}),
        # A driver without the function.
        ({"nvlink_replays": 4, "nvmlDeviceGetFieldValues": 13}, {"replay": 12, "recovery": 0}),
    ],
)
def test_link_errors_are_read_from_the_counters_that_a_gpu_has(
    gpus: FakeNvml, driver: dict[str, int], errors: dict[str, int]
) -> None:
    gpus.set({"gpus": 1, "nvlinks": 4, "nvlink_down": 2} | driver)
    [sample] = ask(gpus, None)
    assert (sample["nvlink_errors"], sample["failed_calls"]) == (errors, {})


def test_a_field_that_fails_is_counted(gpus: FakeNvml) -> None:
    gpus.set({"gpus": 1, "nvlinks": 2, "field.161": 1, "field.162.status": 15})
    [sample] = ask(gpus, None)
    assert sample["nvlink_errors"] == {"replay": 2, "recovery": 0}
    assert sample["failed_calls"] == {"GpuIsLost": 2}


def test_a_gpu_without_links_has_no_link_errors(gpus: FakeNvml) -> None:
    gpus.set({"gpus": 1, "field.161": 9})
    [sample] = ask(gpus, None)
    assert (sample["nvlinks_active"], sample["nvlink_errors"]) == (None, {})


def test_only_gpus_that_cuda_sees_are_asked(gpus: FakeNvml) -> None:
    chosen = ["2,0,1", "GPU-00000001", "1,7,0", "MIG-00000002-aaaa,1"]
    found: dict[object, list[object]] = {}
    for sample in ask(gpus, *chosen):
        found.setdefault(sample["visible"], []).append(sample["uuid"])
    assert found == {
        "2,0,1": ["GPU-00000002-aaaa", "GPU-00000000-aaaa"],
        "GPU-00000001": ["GPU-00000001-aaaa"],
        "1,7,0": ["GPU-00000001-aaaa"],  # what follows one that is not there is not visible
        "MIG-00000002-aaaa,1": ["MIG-00000002-aaaa", "GPU-00000001-aaaa"],
    }
    [nothing] = ask(gpus, "")
    assert nothing == {"unavailable": "the driver shows no GPU that this engine may use"}


def test_an_instance_has_its_own_memory_and_the_heat_of_its_gpu(gpus: FakeNvml) -> None:
    gpus.set({"mig": 1, "temperature": 77, "reasons": 0x20})
    [sample, _] = ask(gpus, None)
    assert (sample["index"], sample["uuid"]) == ("0", "MIG-00000000-aaaa")
    assert sample["memory_total_bytes"] == 80_000_000_000
    assert (sample["temperature_celsius"], sample["throttle_reasons"]) == (77.0, ["sw_thermal"])
    assert (sample["utilization_ratio"], sample["failed_calls"]) == (None, {})


def test_a_driver_that_is_not_loaded_is_no_error(gpus: FakeNvml) -> None:
    gpus.set({"nvmlInitWithFlags": 9})
    assert ask(gpus, None) == [{"unavailable": "NVML says DriverNotLoaded"}]


def test_each_process_has_its_own_bytes(gpus: FakeNvml) -> None:
    gpus.set({"processes": 3, "process.0.bytes": 21 << 30})
    gpus.set({"process.1.pid": 7, "process.1.bytes": 40 << 30, "process.2.pid": 8})
    assert processes(gpus) == {
        "memory": [39_400_000_000, 80_000_000_000],
        "own": 21 << 30,
        "others": {"7": 40 << 30},  # nothing is known of the third
    }


def test_a_process_of_two_instances_has_the_bytes_of_both(gpus: FakeNvml) -> None:
    gpus.set({"processes": 2, "process.0.bytes": 1 << 30, "process.1.bytes": 2 << 30})
    assert processes(gpus)["own"] == 3 << 30


def test_a_driver_that_lists_no_processes_says_nothing_of_them(gpus: FakeNvml) -> None:
    nothing = {"memory": [39_400_000_000, 80_000_000_000], "own": None, "others": {}}
    assert processes(gpus) == nothing
    gpus.set({"processes": 1, "nvmlDeviceGetComputeRunningProcesses_v3": 3})
    assert processes(gpus) == nothing
