"""From a configuration to an engine that steps: every byte enters the ledger on the way."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from ullage_engine.config import EngineConfig, MemorySection
from ullage_engine.core.engine import Engine
from ullage_engine.core.meter import MemoryMeter, give_back_freed, touch_pages
from ullage_engine.core.pace import Pace
from ullage_engine.core.runner import ModelRunner, RunnerSettings
from ullage_engine.core.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.cores import usable_cores
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.ledger import Ledger, mib, wrong_price
from ullage_engine.memory.predictor import block_bytes, num_blocks, sequence_bytes
from ullage_engine.messages import CacheGroupSpec, Loading, Profile
from ullage_engine.models.dtypes import dtype_name, resolve_dtype
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.weights.store import LoadedModel, load_weights
from ullage_rpc.memory import container_limit, usable_bytes

log = logging.getLogger("ullage.engine.worker")

_BLOCK_TOKENS = 16

_STAGING_BYTES = 16 << 20
"""For messages, token lists and queues, which come and go with requests."""

Report = Callable[[Loading], None]


class StartError(Exception):
    """The worker cannot serve with this configuration; one line naming the field."""


@dataclass(frozen=True, slots=True)
class Started:
    """A loaded engine and what is known of it."""

    engine: Engine
    ledger: Ledger
    meter: MemoryMeter
    pace: Pace
    profile: Profile
    max_model_len: int
    vocab_size: int
    dtype: str


def start(config: EngineConfig, report: Report) -> Started:
    """Loads the model and sizes everything.

    Raises:
        StartError, LedgerError, WeightsError: one line saying what to change.
    """
    _check_parallelism(config)
    _check_kv_dtype(config)
    device = _prepare_device(config)
    return _Startup(config, device, report).run()


class _Startup:
    """The steps of a start, in their order; each reserves before it allocates."""

    def __init__(self, config: EngineConfig, device: torch.device, report: Report) -> None:
        self._config = config
        self._device = device
        self._report = report
        self._meter = MemoryMeter(device)
        self._ledger = _open_ledger(config, device)
        self._dtype = resolve_dtype(config.model.dtype, device)

    def run(self) -> Started:
        self._ledger.record("context", self._meter.used_bytes())
        loaded = self._load()
        max_model_len = _max_model_len(self._config, loaded.geometry)
        limits = _scheduler_limits(self._config, max_model_len, loaded.geometry.replay_tokens)
        settings = _runner_settings(limits, self._config.model.deterministic)
        runner = ModelRunner(loaded, self._device, self._dtype, settings)
        self._allocate_arenas(runner)
        self._warm_up(runner)
        profile = self._profile(loaded.geometry, runner, settings)
        self._allocate_kv(runner, profile)
        self._check_prices(runner, profile)
        self._settle()
        pace = Pace()
        policy = _kv_policy(self._config.memory, block_bytes(profile), runner.num_host_slots)
        scheduler = Scheduler(profile, limits, pace, ExpectedOutput(max_model_len), policy)
        return Started(
            engine=Engine(scheduler, runner, pace),
            ledger=self._ledger,
            meter=self._meter,
            pace=pace,
            profile=profile,
            max_model_len=max_model_len,
            vocab_size=loaded.geometry.vocab,
            dtype=dtype_name(self._dtype),
        )

    def _load(self) -> LoadedModel:
        model, folder = self._config.model, Path(self._config.server.weights_dir)
        loaded = load_weights(model, self._device, self._dtype, folder, self._progress("weights"))
        self._ledger.record("weights", loaded.nbytes)
        give_back_freed()
        touch_pages(loaded.tensors.values(), self._device)
        return loaded

    def _allocate_arenas(self, runner: ModelRunner) -> None:
        sizes = {
            "step_arena": runner.step_arena_bytes,
            "sampler_arena": runner.sampler_arena_bytes,
        }
        progress = self._progress("arena")
        progress(0, sum(sizes.values()))
        for name, size in sizes.items():
            self._ledger.reserve(name, size)
        runner.allocate_arena()
        for name, size in sizes.items():
            self._ledger.allocated(name, size)
        progress(sum(sizes.values()), sum(sizes.values()))

    def _warm_up(self, runner: ModelRunner) -> None:
        """Runs the largest steps on a pool of one block; what libraries took is the workspace."""
        self._progress("warm_up")(0, 0)
        error = runner.prove()
        if error is not None:
            raise StartError(f"spec.model.deterministic: {error}; set false on this machine")
        give_back_freed()
        runner.allocate_kv(1)
        runner.warm_up()
        known = self._ledger.allocated_bytes + runner.kv_block_bytes + runner.state_pool_bytes
        self._ledger.record("workspace", max(0, self._meter.used_bytes() - known))

    def _allocate_kv(self, runner: ModelRunner, profile: Profile) -> None:
        """The KV pool takes the whole blocks that fit in what is left."""
        size = profile.kv_pool_bytes
        progress = self._progress("kv_pool")
        progress(0, size)
        runner.allocate_kv(size // block_bytes(profile), self._num_host_slots(profile))
        # The pool may lie where the first warm-up had its temporaries; give them their place now,
        # or the first requests would.
        runner.run_largest()
        self._ledger.allocated("kv_pool", size)
        if runner.state_pool_bytes:
            self._ledger.allocated("state_pool", runner.state_pool_bytes)
        if runner.num_host_slots:
            self._ledger.allocated("host_kv", self._host_kv_bytes(profile))
        progress(size, size)

    def _num_host_slots(self, profile: Profile) -> int:
        return self._config.memory.host_kv // block_bytes(profile)

    def _host_kv_bytes(self, profile: Profile) -> int:
        """What of the host's slots lies on the device: all of them where it is the host, else the
        one block of staging that they are copied through."""
        slots = self._num_host_slots(profile)
        return block_bytes(profile) * (slots if self._device.type == "cpu" else min(slots, 1))

    def _reserve_host_kv(self, profile: Profile) -> None:
        wanted = self._config.memory.host_kv
        if not wanted:
            return
        slots, block = self._num_host_slots(profile), block_bytes(profile)
        if not slots:
            raise StartError(
                f"memory.hostKV: {wanted} bytes hold no KV block of {block} bytes; "
                f"set {mib(block + (1 << 20))} or more, or 0 to recompute preempted sequences"
            )
        self._ledger.reserve("host_kv", self._host_kv_bytes(profile))
        log.info("%s of host memory are %d slots for swapped KV", mib(slots * block), slots)

    def _check_prices(self, runner: ModelRunner, profile: Profile) -> None:
        """Compares what was allocated with the formulas that admission and the router use."""
        blocks = profile.kv_pool_bytes // block_bytes(profile)
        priced = {
            "weights": runner.weights_bytes,
            "step_arena": runner.step_arena_bytes,
            "sampler_arena": runner.sampler_arena_bytes,
            "state_pool": runner.state_pool_bytes,
            "kv_pool": sequence_bytes(profile, blocks * profile.block_tokens),
        }
        error = wrong_price(priced, runner.allocated_bytes())
        if error is not None:
            raise StartError(error)

    def _settle(self) -> None:
        """Records what the workspace holds in the end: the pool may have taken freed parts of it.

        What exceeds it, such as the pool's bookkeeping, is staging.
        """
        entries = {entry.name: entry for entry in self._ledger.states()}
        workspace, staging = entries["workspace"], entries["staging"]
        known = self._ledger.allocated_bytes - workspace.allocated_bytes
        rest = max(0, self._meter.used_bytes() - known)
        self._ledger.allocated("workspace", min(rest, workspace.reserved_bytes))
        excess = rest - workspace.reserved_bytes
        self._ledger.allocated("staging", min(max(0, excess), staging.reserved_bytes))

    def _profile(
        self, geometry: ModelGeometry, runner: ModelRunner, settings: RunnerSettings
    ) -> Profile:
        chunk = settings.max_step_tokens - settings.max_sequences
        profile = Profile(
            block_tokens=settings.block_tokens,
            groups=[
                CacheGroupSpec(bytes_per_token=geometry.kv_bytes_per_token(self._dtype.itemsize))
            ],
            state_bytes_per_sequence=geometry.state_bytes(self._dtype.itemsize),
            activation_bytes_per_token=runner.step_arena_bytes // settings.max_step_tokens,
            sampler_bytes_per_sequence=runner.sampler_arena_bytes // settings.max_sequences,
            prefill_chunk_tokens=chunk,
            kv_pool_bytes=0,
        )
        assert block_bytes(profile) == runner.kv_block_bytes, "priced and allocated blocks differ"
        if runner.state_pool_bytes:
            self._ledger.reserve("state_pool", runner.state_pool_bytes)
        self._reserve_beside_kv(profile)
        size = self._reserve_kv(block_bytes(profile), num_blocks(profile, chunk))
        return msgspec.structs.replace(profile, kv_pool_bytes=size)

    def _reserve_beside_kv(self, profile: Profile) -> None:
        self._ledger.reserve("staging", _STAGING_BYTES)
        self._ledger.reserve("safety_reserve", self._config.memory.safety_reserve)
        self._reserve_host_kv(profile)

    def _reserve_kv(self, block: int, least_blocks: int) -> int:
        """Bytes of the KV pool: whole blocks, and at least those of the largest prompt chunk."""
        memory, ledger = self._config.memory, self._ledger
        least = least_blocks * block
        if memory.max_kv < least:
            raise StartError(
                f"memory.maxKV: {mib(memory.max_kv)} is less than the {mib(least)} of KV that one "
                f"prompt chunk needs; set {mib(least + block)} or more"
            )
        if ledger.available_bytes < least:
            raise ledger.shortage("kv_pool", least)
        size = min(memory.max_kv, ledger.available_bytes) // block * block
        ledger.reserve("kv_pool", size)
        return size

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self._report(Loading(stage=stage, done_bytes=done, total_bytes=total))

        return report


def _check_parallelism(config: EngineConfig) -> None:
    pool = config.server.pool
    if config.gpus != 1:
        raise StartError(
            f"pools.{pool}.gpus: {config.gpus} is not supported by this version's engine, "
            "which uses one device; set 1"
        )
    ranks = config.parallelism
    if (ranks.tensor, ranks.pipeline) != (1, 1):
        raise StartError(
            f"pools.{pool}.parallelism: tensor {ranks.tensor} and pipeline {ranks.pipeline} are "
            "not supported by this version's engine; set both to 1"
        )


def _check_kv_dtype(config: EngineConfig) -> None:
    if config.model.kv_dtype != "auto":
        raise StartError(
            f"spec.model.kvDtype: {config.model.kv_dtype} is not supported by this version's "
            "attention; set auto"
        )


def _prepare_device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise StartError("device: cuda is asked for, but torch finds no GPU; set auto or cpu")
    torch.set_num_threads(config.server.threads or usable_cores())
    use_cuda = has_cuda and config.device != "cpu"
    device = torch.device("cuda", 0) if use_cuda else torch.device("cpu")
    # Starts the thread pool and the libraries, whose memory is the context.
    torch.ones((256, 256), device=device) @ torch.ones((256, 256), device=device)
    return device


def _open_ledger(config: EngineConfig, device: torch.device) -> Ledger:
    memory = config.memory
    if device.type == "cpu":
        total = _cpu_bytes(memory.device_bytes)
        return Ledger(total, memory.threshold, configurable=True)
    total = int(torch.cuda.mem_get_info(device)[1])
    return Ledger(total, memory.threshold, configurable=False)


def _cpu_bytes(configured: int | None) -> int:
    """Budget of a CPU device: as configured, else all that is to be had."""
    limit = container_limit()
    if configured is not None and limit is not None and configured > limit:
        raise StartError(
            f"memory.deviceBytes: {mib(configured)} is more than the container's limit of "
            f"{mib(limit)}; raise the limit or set less"
        )
    return usable_bytes() if configured is None else configured


def _max_model_len(config: EngineConfig, geometry: ModelGeometry) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return geometry.max_position
    if not 1 < wanted <= geometry.max_position:
        raise StartError(
            f"spec.model.maxModelLen: {wanted} is not between 2 and the {geometry.max_position} "
            f"tokens the model was made for; set {geometry.max_position} or less"
        )
    return wanted


def _prompt_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Prompt tokens of one step; without chunking a whole prompt must fit."""
    chunk = config.batching.prefill_chunk_tokens
    return min(chunk, max_model_len) if chunk else max_model_len


def _scheduler_limits(
    config: EngineConfig, max_model_len: int, replay_tokens: int
) -> SchedulerLimits:
    batching = config.batching
    return SchedulerLimits(
        max_model_len=max_model_len,
        max_sequences=batching.max_sequences,
        prompt_tokens=_prompt_tokens(config, max_model_len),
        is_chunked=batching.prefill_chunk_tokens > 0,
        decode_tokens=batching.decode_max_batch_tokens,
        replay_tokens=replay_tokens,
    )


def _kv_policy(memory: MemorySection, block: int, num_host_slots: int) -> KvPolicy:
    return KvPolicy(
        prefix_cache=memory.prefix_cache,
        session_blocks=memory.session_kv_limit // block,
        session_idle=memory.session_idle,
        host_slots=num_host_slots,
    )


def _runner_settings(limits: SchedulerLimits, deterministic: bool) -> RunnerSettings:
    return RunnerSettings(
        max_step_tokens=limits.prompt_tokens + limits.max_sequences,
        max_sequences=limits.max_sequences,
        max_model_len=limits.max_model_len,
        decode_max_batch_tokens=limits.decode_tokens,
        block_tokens=_BLOCK_TOKENS,
        deterministic=deterministic,
    )
