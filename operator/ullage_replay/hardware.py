"""The hardware file: what was measured of engines on one machine, with which a replay computes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ullage_common.config.engine import EngineConfig, kv_limit
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

    def resized(self, config: EngineConfig) -> "EngineHardware":
        """Return the engine as another configuration of the same model would size it.

        The KV pool, the batch and the prompt chunks follow the configuration. So do the buffers
        whose sizes depend on these.

        Raises:
            HardwareError: the configuration leaves no memory for KV.
        """
        batching = config.batching
        profile = self.profile
        limits = self.limits
        max_model_len = min(self.max_model_len, config.model.max_model_len or self.max_model_len)
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

    def engine_of(self, pool: str, gpus: int) -> EngineHardware:
        """Return the measured engine of a pool, or else one with equally many GPUs.

        Raises:
            HardwareError: no such engine has been measured.
        """
        own = self.engines.get(pool)
        if own and own.gpus == gpus:
            return own
        for other in self.engines.values():
            if other.gpus == gpus:
                return other
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
