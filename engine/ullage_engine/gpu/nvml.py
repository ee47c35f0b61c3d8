"""GPU metrics from NVIDIA's driver, through NVML (the package nvidia-ml-py).

Any call may fail independently of the others. A metric is None if the GPU, the MIG instance, the
driver or the container does not provide it. After any other failure, the metric is also None, and
the failure is counted. A call to a hung driver never returns, so make all calls from a single
thread that no other thread waits for.
"""

import ctypes
import importlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

THROTTLE_REASONS: Mapping[str, int] = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""NVML's bits for the reasons that a GPU's clocks are throttled, keyed by DCGM's names."""

NVLINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")
"""Kinds of NVLink errors, in the order of NVML's constants."""

NVLINK_ERROR_FIELDS: Mapping[int, str] = {
    161: "replay",  # NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY
    162: "recovery",  # NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY
    163: "crc",  # NVML_FI_DEV_NVLINK_ERROR_DL_CRC
    215: "recovery",  # NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, of Blackwell
}
"""NVML's field ids that count a link's errors on Hopper and later, and the kinds of errors.

On these GPUs `nvmlDeviceGetNvLinkErrorCounter` returns nothing or zero, and on earlier GPUs these
fields do. Blackwell has dropped the first three.
"""

_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Fields of NVML's union of values, in the order of its constants for types."""


class NvmlUnavailableError(Exception):
    """The driver is missing, or no GPU is available to this engine. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """The metrics of one GPU at one moment. A metric is None if the driver does not provide it."""

    index: str
    """Index of the GPU in the driver's order."""
    uuid: str
    memory_total_bytes: float | None
    memory_used_bytes: float | None
    memory_free_bytes: float | None
    memory_reserved_bytes: float | None
    """Memory that the driver reserves for itself. It does not count as used."""
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    sm_clock_hertz: float | None
    memory_clock_hertz: float | None
    utilization_ratio: float | None
    """Fraction of the last sample period in which a kernel was running, 0 to 1."""
    memory_utilization_ratio: float | None
    """Fraction of the last sample period in which memory was being read or written, 0 to 1."""
    throttle_reasons: frozenset[str] | None
    """Active throttle reasons, with the names from `THROTTLE_REASONS`."""
    ecc_uncorrected_errors: float | None
    """Number of uncorrected ECC errors since the driver was loaded."""
    remapped_rows: Mapping[str, int]
    """Number of remapped memory rows, by cause: corrected or uncorrected errors."""
    row_remap_pending: float | None
    """1 while a memory row is waiting for a GPU reset to be remapped, otherwise 0."""
    row_remap_failed: float | None
    """1 if a memory row could not be remapped, otherwise 0."""
    nvlinks_active: float | None
    nvlink_errors: Mapping[str, int]
    """Total number of errors across all NVLinks, by kind."""
    pcie_replays: float | None
    failed_calls: Mapping[str, int]
    """Number of failed NVML calls so far, by error."""


class Nvml:
    """The initialised NVML library.

    Raises:
        NvmlUnavailableError: the driver or its Python bindings are missing.
    """

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailableError("the package nvidia-ml-py is not installed") from error
        module = self.module
        self.not_offered = {
            module.NVML_ERROR_NOT_SUPPORTED,
            module.NVML_ERROR_FUNCTION_NOT_FOUND,
            module.NVML_ERROR_INVALID_ARGUMENT,
            module.NVML_ERROR_NO_PERMISSION,
            module.NVML_ERROR_NOT_FOUND,
        }
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise NvmlUnavailableError(f"NVML says {self.name_of(error)}") from error

    def name_of(self, error: Any) -> str:
        """Return an error's name, such as GpuIsLost, without calling the driver."""
        name: str = type(error).__name__.removeprefix("NVMLError_")
        return name if name != "NVMLError" else f"error {error.value}"

    def query(self, errors: Counter[str], *names: str, arguments: tuple[Any, ...]) -> Any:
        """Call an NVML function under the first name that is available, and return its result.

        Return None if the function is not available under any name, or if the call fails.

        Args:
            errors: counter of failures. A metric that the driver does not provide is not counted as
                a failure.
            names: a function's name, and its names in older bindings or drivers.
            arguments: arguments of the function.
        """
        for name in names:
            function = getattr(self.module, name, None)
            if function is None:
                continue
            try:
                return function(*arguments)
            except self.module.NVMLError as error:
                if error.value not in self.not_offered:
                    errors[self.name_of(error)] += 1
                    return None
        return None

    def field_value(self, errors: Counter[str], value: Any) -> float | None:
        """Return the number in a result of nvmlDeviceGetFieldValues, or None if there is none.

        Args:
            errors: counter of failures. A field that the driver does not provide is not counted as
                a failure.
            value: one of the results, each of which has a status of its own.
        """
        status = value.nvmlReturn
        if status == self.module.NVML_SUCCESS and value.valueType < len(_VALUE_TYPES):
            number: float = getattr(value.value, _VALUE_TYPES[value.valueType])
            return number
        if status != self.module.NVML_SUCCESS and status not in self.not_offered:
            errors[self.name_of(self.module.NVMLError(status))] += 1
        return None

    def gpus(self, environment: Mapping[str, str], limit: int) -> list["Gpu"]:
        """Return the first `limit` GPUs that CUDA would see with these environment variables.

        By default, CUDA orders GPUs by speed and NVML orders them by bus ID. The two orders match
        if all GPUs of a node are the same model.

        Raises:
            NvmlUnavailableError: CUDA would see no GPU.
        """
        handles = itertools.islice(self._visible(environment.get("CUDA_VISIBLE_DEVICES")), limit)
        if gpus := [Gpu(self, handle, number) for number, handle in enumerate(handles)]:
            return gpus
        raise NvmlUnavailableError("the driver shows no GPU that this engine may use")

    def _visible(self, listed: str | None) -> Iterator[Any]:
        count = self._ask("nvmlDeviceGetCount") or 0
        entries = [str(n) for n in range(count)] if listed is None else listed.split(",")
        for entry in entries:
            handle = self._find(entry.strip(), count)
            if handle is None:  # CUDA ignores all entries behind an unknown one
                return
            yield handle

    def _find(self, entry: str, count: int) -> Any:
        """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, or None if there is none."""
        if entry.isdecimal():
            handle = self._ask("nvmlDeviceGetHandleByIndex", int(entry))
            return handle and self._first_instance(handle)
        if entry.startswith("MIG-"):
            return self._ask("nvmlDeviceGetHandleByUUID", entry)
        for number in range(count if entry else 0):  # CUDA accepts a prefix of a UUID, too
            handle = self._ask("nvmlDeviceGetHandleByIndex", number)
            if handle and str(self._ask("nvmlDeviceGetUUID", handle)).startswith(entry):
                return self._first_instance(handle)
        return None

    def _first_instance(self, handle: Any) -> Any:
        """Return the MIG instance that CUDA uses on a partitioned GPU, otherwise the GPU itself."""
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return handle
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if instance:
                return instance
        return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self.query(Counter(), name, arguments=arguments)


class Gpu:
    """One GPU or MIG instance. All metrics except memory describe the whole GPU."""

    def __init__(self, nvml: Nvml, handle: Any, number: int) -> None:
        """Query the GPU's index and UUID. If the driver does not provide an index, use `number`."""
        self._nvml = nvml
        self._handle = handle
        self._failed: Counter[str] = Counter()
        whole = nvml.query(
            Counter(), "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", arguments=(handle,)
        )
        self._whole = whole or handle
        index = self._ask("nvmlDeviceGetIndex")
        self.index = str(number if index is None else index)
        self.uuid = str(self._query("nvmlDeviceGetUUID", arguments=(handle,)))
        self._num_links: int | None = None
        self._nvlink_errors: dict[str, int] = {}

    @property
    def address(self) -> int | None:
        """The driver's identifier of the whole GPU, which also appears in Xid events."""
        return _address(self._whole)

    def sample(self, *, with_links: bool) -> GpuSample:
        """Query all metrics.

        NVLink metrics take many driver calls, so they are updated only if `with_links` is true.
        """
        module = self._nvml.module
        if with_links:
            self._ask_links()
        memory = self._memory()
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        rows = self._ask("nvmlDeviceGetRemappedRows")
        return GpuSample(
            index=self.index,
            uuid=self.uuid,
            memory_total_bytes=memory and memory.total,
            memory_used_bytes=memory and memory.used,
            memory_free_bytes=memory and memory.free,
            memory_reserved_bytes=getattr(memory, "reserved", None),
            power_watts=_scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            power_limit_watts=_scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            temperature_celsius=self._temperature(),
            sm_clock_hertz=self._clock(module.NVML_CLOCK_SM),
            memory_clock_hertz=self._clock(module.NVML_CLOCK_MEM),
            utilization_ratio=_scaled(rates and rates.gpu, 0.01),
            memory_utilization_ratio=_scaled(rates and rates.memory, 0.01),
            throttle_reasons=self._throttle_reasons(),
            ecc_uncorrected_errors=self._ask(
                "nvmlDeviceGetTotalEccErrors",
                module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                module.NVML_VOLATILE_ECC,
            ),
            remapped_rows={} if rows is None else {"corrected": rows[0], "uncorrected": rows[1]},
            row_remap_pending=rows and rows[2],
            row_remap_failed=rows and rows[3],
            nvlinks_active=self._num_links,
            nvlink_errors=dict(self._nvlink_errors),
            pcie_replays=self._ask("nvmlDeviceGetPcieReplayCounter"),
            failed_calls=dict(self._failed),
        )

    def free_and_total_bytes(self) -> tuple[int, int] | None:
        """Return the free and total bytes of GPU memory, or None if they are unknown.

        Unlike CUDA, NVML works without a context, which would itself take GPU memory.
        """
        memory = self._memory()
        return None if memory is None else (int(memory.free), int(memory.total))

    def process_bytes(self) -> dict[int, int]:
        """Return each compute process's GPU memory in bytes, keyed by the PID from the driver.

        The result is empty if the driver does not provide this, as in some containers, under MPS
        and on Windows.
        """
        listed = self._query(
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetComputeRunningProcesses_v2",
            arguments=(self._handle,),
        )
        sizes: Counter[int] = Counter()
        for process in listed or ():
            if process.usedGpuMemory is not None:
                sizes[process.pid] += process.usedGpuMemory
        return dict(sizes)

    def register_xid_events(self, event_set: Any) -> bool:
        """Register for the GPU's Xid errors. Return False if the GPU does not report them."""
        module = self._nvml.module
        try:
            module.nvmlDeviceRegisterEvents(
                self._whole, module.nvmlEventTypeXidCriticalError, event_set
            )
        except module.NVMLError:
            return False
        return True

    def _query(self, *names: str, arguments: tuple[Any, ...]) -> Any:
        return self._nvml.query(self._failed, *names, arguments=arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._query(name, arguments=(self._whole, *arguments))

    def _memory(self) -> Any:
        module = self._nvml.module
        name = "nvmlDeviceGetMemoryInfo"
        memory = self._query(name, arguments=(self._handle, module.nvmlMemory_v2))
        # The first version, of older drivers, counts reserved memory as used.
        return memory or self._query(name, arguments=(self._handle,))

    def _temperature(self) -> float | None:
        names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
        sensor = self._nvml.module.NVML_TEMPERATURE_GPU
        return _scaled(self._query(*names, arguments=(self._whole, sensor)), 1.0)

    def _clock(self, kind: int) -> float | None:
        return _scaled(self._ask("nvmlDeviceGetClockInfo", kind), 1e6)

    def _throttle_reasons(self) -> frozenset[str] | None:
        bits = self._query(
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            arguments=(self._whole,),
        )
        if bits is None:
            return None
        return frozenset(name for name, bit in THROTTLE_REASONS.items() if bits & bit)

    def _ask_links(self) -> None:
        states = self._link_states()
        active = [link for link, is_active in enumerate(states) if is_active]
        self._num_links = len(active) if states else None
        totals = self._link_error_fields(active)
        for kind, name in enumerate(NVLINK_ERRORS):
            counts = [self._ask("nvmlDeviceGetNvLinkErrorCounter", n, kind) for n in active]
            if given := [count for count in counts if count is not None]:
                totals.append((name, sum(given)))

        # A GPU that lacks a counter may report zero for it.
        self._nvlink_errors |= {
            name: max(total for each, total in totals if each == name) for name, _ in totals
        }

    def _link_error_fields(self, links: list[int]) -> list[tuple[str, int]]:
        """Return the kind and the total over all links of each field that the driver fills."""
        if not links:
            return []
        asked = [(field, link) for field in NVLINK_ERROR_FIELDS for link in links]
        totals: dict[int, int] = {}
        for value in self._ask("nvmlDeviceGetFieldValues", asked) or ():
            count = self._nvml.field_value(self._failed, value)
            if count is not None:
                totals[value.fieldId] = totals.get(value.fieldId, 0) + int(count)
        return [(NVLINK_ERROR_FIELDS[field], total) for field, total in totals.items()]

    def _link_states(self) -> list[int]:
        """Return the state of each NVLink of the GPU."""
        links = range(self._nvml.module.NVML_NVLINK_MAX_LINKS)
        states = (self._ask("nvmlDeviceGetNvLinkState", link) for link in links)
        return list(itertools.takewhile(lambda state: state is not None, states))


class XidEvents:
    """The stream of Xid errors that the driver reports.

    Raises:
        NvmlUnavailableError: no GPU reports Xid errors.
    """

    def __init__(self, nvml: Nvml, gpus: list[Gpu]) -> None:
        self._module = module = nvml.module
        self._gpus = {gpu.address: gpu for gpu in gpus}
        try:
            self._events = module.nvmlEventSetCreate()
        except module.NVMLError as error:
            raise NvmlUnavailableError(nvml.name_of(error)) from error
        self._nvml = nvml
        # One GPU without events does not keep others from sending theirs.
        if not sum(gpu.register_xid_events(self._events) for gpu in gpus):
            module.nvmlEventSetFree(self._events)
            raise NvmlUnavailableError("no GPU sends events")

    def wait(self, timeout_s: float) -> tuple[Gpu, int] | None:
        """Wait for the next Xid error, and return its GPU and error code.

        Return None on timeout, or if the error belongs to an unknown GPU.

        Raises:
            NvmlUnavailableError: the driver has stopped reporting errors.
        """
        module = self._module
        try:
            event = module.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except module.NVMLError as error:
            if error.value == module.NVML_ERROR_TIMEOUT:
                return None
            raise NvmlUnavailableError(self._nvml.name_of(error)) from error
        # Not by its index, which a lost GPU (Xid 79) no longer has.
        gpu = self._gpus.get(_address(event.device))
        return None if gpu is None else (gpu, event.eventData)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
