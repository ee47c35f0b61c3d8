"""The hardware file: what was measured of engines on one machine, with which a replay computes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ullage_common.config.engine import EngineConfig, ModelSection, kv_limit
from ullage_common.request_cost import MemoryProfile
from ullage_engine.protocol.worker_state import ReservationState
from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_replay.cost import Curve, StepCost

VERSION = 1


class HardwareError(Exception):
    """The file cannot be used. The message names the field, the value and the remedy."""


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Time that passes outside of steps, in seconds."""

    before: float
    """From the client's request to the engine's worker."""
    after: float
    """From the end of a step to the client's token."""
    between_steps: Curve
    """Between the end of a step and the beginning of the next, by number of sequences."""


class EngineHardware(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool's engine reported and how fast it was."""

    gpus: int
    device: str
    """Type of device: cpu or cuda."""
    dtype: str = ""
    """Data type of weights and activations, such as bfloat16 (empty if unknown)."""
    quantization: str = ""
    """Formats of the matrices, joined by +, such as int4+int8, or none (empty if unknown)."""
    kv_dtype: str = ""
    """Data type of the KV cache, such as bfloat16 or float8 (empty if unknown)."""
    max_model_len: int
    profile: MemoryProfile
    limits: SchedulerLimits
    """Limits of the scheduler, some of which the engine measured when it started."""
    total_bytes: int
    threshold: float
    ledger: tuple[ReservationState, ...]
    longest_step_s: float
    cost: StepCost
    overheads: Overheads

    def mismatch(self, config: EngineConfig) -> str:
        """Return why the figures do not hold for a configuration (empty if they do).

        The reason is one line that names the field, the value and the remedy. A field of the
        configuration that is auto is taken to mean what was measured.
        """
        model = config.model
        if config.engine == "vllm":
            return "engine: vllm is not replayed; only native engines are, so set native"
        if config.device not in ("auto", self.device):
            return _other("device", config.device, self.device)
        if self._num_in_flight(config) > 1:
            return (
                f"parallelism.pipeline: {config.parallelism.pipeline} stages with several steps in "
                "flight are not replayed; set 1 and more of parallelism.tensor instead"
            )
        if self.limits.max_in_flight > 1:
            return (
                f"limits.max_in_flight: {self.limits.max_in_flight} steps in flight, as in the "
                "measured engine's pipeline, are not replayed; measure a service without a pipeline"
            )
        if self.dtype and model.dtype not in ("auto", self.dtype):
            return _other("model.dtype", model.dtype, self.dtype)
        if self.quantization and not _is_quantized_as(model.quantization, self.quantization):
            return _other("model.quantization", model.quantization, self.quantization)
        kv_dtype = _kv_dtype_of(model)
        is_same_kv = kv_dtype == self.kv_dtype or (kv_dtype == "auto" and self.kv_dtype != "float8")
        if self.kv_dtype and not is_same_kv:
            return _other("model.kvDtype", kv_dtype, self.kv_dtype)
        if model.max_model_len and model.max_model_len > self.max_model_len:
            return (
                f"model.maxModelLen: {model.max_model_len} is above the {self.max_model_len} that "
                f"was measured; set {self.max_model_len} or less, or measure a service with "
                f"{model.max_model_len}"
            )
        return ""

    def _num_in_flight(self, config: EngineConfig) -> int:
        """Return how many steps a configuration's pipeline has in flight, as the engine does."""
        own = 1 if self.device == "cpu" else config.parallelism.pipeline
        return min(config.parallelism.decode_batches or own, config.parallelism.pipeline)

    def resized(self, config: EngineConfig) -> "EngineHardware":
        """Return the engine as another configuration of the same model would size it.

        The KV pool, the batch and the prompt chunks follow the configuration. So do the buffers
        whose sizes depend on these.

        Raises:
            HardwareError: the figures do not hold for the configuration, or it leaves no memory for
                KV.
        """
        if problem := self.mismatch(config):
            raise HardwareError(f"pool {config.server.pool}: {problem}")
        batching = config.batching
        profile = self.profile
        limits = self.limits
        max_model_len = config.model.max_model_len or self.max_model_len
        chunk = batching.prefill_chunk_tokens
        prompt_tokens = limits.prompt_tokens if chunk is None else chunk or max_model_len
        resized = msgspec.structs.replace
        new_limits = _replaced_limits(
            limits,
            max_model_len=max_model_len,
            max_sequences=batching.max_sequences,
            prompt_tokens=min(prompt_tokens, max_model_len),
            is_chunked=chunk != 0,
            max_decodes=batching.decode_max_batch_tokens,
            num_speculative_tokens=batching.num_speculative_tokens,
        )

        old_rows = profile.prefill_chunk_tokens + limits.max_sequences
        chunk_tokens = profile.prefill_chunk_tokens if chunk is None else new_limits.prompt_tokens
        changes = {
            "step_arena": profile.activation_bytes_per_token
            * (chunk_tokens + batching.max_sequences - old_rows),
            "sampler_arena": profile.sampler_bytes_per_sequence
            * (batching.max_sequences - limits.max_sequences),
        }
        total = config.memory.device_bytes or self.total_bytes
        ledger = [_changed(entry, changes, config) for entry in self.ledger]
        others = sum(e.reserved_bytes for e in ledger if e.name != "kv_pool" and not e.on_host)
        available = int(total * config.memory.threshold) - others
        limit = kv_limit(config.memory, on_cpu=self.device == "cpu")
        block = profile.block_bytes
        pool = (available if limit is None else min(limit, available)) // block * block
        needed = -(-new_limits.prompt_tokens // profile.block_tokens) * block
        if pool < needed:
            raise HardwareError(
                f"memory of pool {config.server.pool}: {max(0, pool)} bytes are left for KV, and a "
                f"prompt chunk of {new_limits.prompt_tokens} tokens needs {needed}; raise "
                f"deviceBytes or maxKV, or lower prefillChunkTokens"
            )
        return resized(
            self,
            max_model_len=max_model_len,
            profile=resized(
                profile,
                kv_pool_bytes=pool,
                prefill_chunk_tokens=chunk_tokens,
                session_kv_bytes=config.memory.session_kv_limit,
            ),
            limits=new_limits,
            total_bytes=total,
            threshold=config.memory.threshold,
            ledger=tuple(
                resized(entry, reserved_bytes=pool, allocated_bytes=pool)
                if entry.name == "kv_pool"
                else entry
                for entry in ledger
            ),
        )


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a hardware file."""

    version: int
    processor: str
    """Name of the processor or GPU on which the engines were measured."""
    model: str
    """Name of the model that was measured."""
    measured_at: str
    """Date and time of the measurement, in UTC."""
    engines: Mapping[str, EngineHardware]
    """Measured engines by pool."""
    slowdown: Mapping[int, float] = {}
    """Factor by which steps take longer while several engines share the machine and all compute.

    The key is the number of engines that compute. For more of them, the factor of the next lower
    number holds. Engines that share nothing have no entry.
    """

    def engine_of(self, pool: str, config: EngineConfig) -> EngineHardware:
        """Return the measured engine of a pool, or else one with equally many GPUs.

        An engine whose figures hold for the configuration goes before one whose do not.

        Raises:
            HardwareError: another model has been measured, or no such engine.
        """
        if config.model.name != self.model:
            raise HardwareError(
                f"pool {pool}: {_other('model.name', config.model.name, self.model)}"
            )
        gpus = config.gpus
        own = self.engines.get(pool)
        engines = [each for each in (own, *self.engines.values()) if each and each.gpus == gpus]
        if engines:
            return next((each for each in engines if not each.mismatch(config)), engines[0])
        measured = ", ".join(f"{name} with {e.gpus}" for name, e in self.engines.items())
        raise HardwareError(
            f"engines: none has the {gpus} GPUs of pool {pool} (measured: {measured}); "
            "measure a service with such a pool"
        )


def read_hardware(path: Path) -> Hardware:
    """Read a hardware file.

    Raises:
        HardwareError: the file cannot be read, or has a wrong value.
    """
    try:
        hardware = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}; measure one with --measure") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: {error}; measure it again with --measure") from None
    if hardware.version != VERSION:
        raise HardwareError(
            f"{path}: version: {hardware.version} is not the {VERSION} that this program reads; "
            "measure it again with --measure"
        )
    return hardware


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write a hardware file, one field a line."""
    path.write_bytes(msgspec.json.format(encode(hardware), indent=1) + b"\n")


def encode(hardware: Hardware) -> bytes:
    """Return a hardware file's content. Infinite limits are left out, since JSON has none."""
    values = msgspec.to_builtins(hardware)
    for name, engine in hardware.engines.items():
        values["engines"][name]["limits"] = engine.limits.as_json()
    return msgspec.json.encode(values)


def _other(field: str, value: str, measured: str) -> str:
    return (
        f"{field}: {value!r} was not measured, but {measured!r} was; measure a service with "
        f"{value!r}, or change the manifest to what was measured"
    )


def _is_quantized_as(quantization: str, formats: str) -> bool:
    """Return whether an engine with this `model.quantization` may have matrices in these formats.

    A quantised checkpoint keeps its own formats with auto and none.
    """
    if quantization in ("auto", "none"):
        return True
    stored = set(formats.split("+"))
    # Any model's vocabulary may be int8, and its experts may be stored in MXFP4.
    return quantization in stored and stored <= {quantization, "int8", "mxfp4"}


def _kv_dtype_of(model: ModelSection) -> str:
    """Return the data type of the KV cache, or auto if the engine chooses it by its device."""
    return "float8" if model.kv_dtype == "fp8" else model.dtype


def _replaced_limits(limits: SchedulerLimits, **changes: object) -> SchedulerLimits:
    return dataclasses.replace(limits, **changes)  # type: ignore[arg-type]


def _changed(
    entry: ReservationState, changes: Mapping[str, int], config: EngineConfig
) -> ReservationState:
    if entry.name == "safety_reserve":
        return msgspec.structs.replace(entry, reserved_bytes=config.memory.safety_reserve)
    more = changes.get(entry.name, 0)
    return msgspec.structs.replace(
        entry,
        reserved_bytes=entry.reserved_bytes + more,
        allocated_bytes=entry.allocated_bytes + more,
    )
