"""The worker's start: from a configuration to vLLM's engine under our ledger."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from ullage_common.config.engine import EngineConfig
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.memory.ledger import Ledger
from ullage_engine.memory.pressure import FreeMemoryMonitor
from ullage_engine.model_loader.loader import source_key
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.protocol.messages import Loading, RankPlace, Ready, WorkerState
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer
from ullage_engine.vllm_worker import arguments
from ullage_engine.vllm_worker.adapters import adapter_folders
from ullage_engine.vllm_worker.arguments import Node
from ullage_engine.vllm_worker.bindings import core as vllm_core
from ullage_engine.vllm_worker.checkpoint import checkpoint_folder, written_bytes
from ullage_engine.vllm_worker.engine import VllmEngine
from ullage_engine.vllm_worker.group import lead
from ullage_engine.vllm_worker.interface import AdapterError
from ullage_engine.vllm_worker.memory import StartMemory
from ullage_engine.vllm_worker.ranks import sweep
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.sequence import EngineLimits
from ullage_engine.vllm_worker.tiers import TiersRefusedError
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.grammar import GrammarError, vocabulary
from ullage_engine.worker.loop import Report
from ullage_kv import namespace

log = logging.getLogger("ullage.engine.vllm")

_PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """vLLM's engine with its ledger, profile and ranks."""

    engine: VllmEngine
    core: vllm_core.VllmCore
    ledger: Ledger
    """Reservations of all ranks together."""
    used_bytes: Callable[[], int]
    free_memory: FreeMemoryMonitor
    """What other processes took of rank 0's device."""
    profile: MemoryProfile
    max_model_len: int
    name: str
    """Name by which clients ask for the model."""
    ranks: list[RankPlace]
    kv_space: bytes = b""
    """Namespace of its KV blocks in tiers outside the device; empty: it uses none."""

    def state(self) -> WorkerState:
        """Measures memory and load; ends idle sessions and withholds KV that others took.

        Raises:
            GroupLostError: the process of a rank has ended.
        """
        self.core.check_ranks()
        engine, missing = self.engine, self.free_memory.missing_bytes()
        engine.reservations.end_idle_sessions()
        engine.withhold(missing)
        return WorkerState(
            **msgspec.structs.asdict(engine.stats()),
            total_bytes=self.ledger.total_bytes,
            threshold=self.ledger.threshold,
            decode_tokens_per_second=engine.throughput.decode_tokens_per_second,
            prefill_tokens_per_second=engine.throughput.prefill_tokens_per_second,
            step_seconds=engine.throughput.step_seconds,
            num_oom_events=0,  # the first ends this worker, whose loop reports it
            releases=engine.releases(),
            ledger=self.ledger.states(),
            rss_bytes=self.used_bytes(),
            kv_withheld_bytes=missing,
        )

    def ready(self, state: WorkerState) -> Ready:
        """Return the message that describes the served model, with the first state."""
        return Ready(
            profile=self.profile,
            max_model_len=self.max_model_len,
            vocab_size=self.core.vocab_size,
            dtype=self.core.dtype,
            ranks=self.ranks,
            task=self.core.task,
            kv_space=self.kv_space,
            # vLLM starts a request with what its connector has then, and computes the rest.
            computes_beside_loads=False,
            state=state,
        )

    def log_start(self) -> None:
        """Log the device map and the served model."""
        for place in self.ranks:
            log.info("%s", place)
        facts = {"dtype": self.core.dtype, "max_model_len": self.max_model_len}
        log.info("worker serves %s with vLLM %s", self.name, vllm_core.VERSION, extra=facts)

    def stop(self) -> None:
        """Ends the processes of other ranks."""
        self.core.close()


def start(
    config: EngineConfig,
    report: Report,
    host_tier: HostTier | None = None,
    *,
    is_restart: bool = False,
) -> Started:
    """Loads the model, sizes the KV pool and returns an engine that steps.

    Args:
        host_tier: memory for KV outside the device.
        is_restart: a worker has served this configuration before, so that a broken adapter fails
            its own requests instead of the start.

    Raises:
        WorkerStartError, LedgerError, WeightsError: one line saying what to change.
    """
    _prepare(config)
    memory = StartMemory(config, host_tier)
    nodes = config.group.nodes
    node = lead(config.group, report, memory.rank_bytes) if nodes > 1 else None
    weights_dir = Path(config.server.weights_dir)
    progress = _Progress(report, lambda: memory.used_bytes() + written_bytes(weights_dir))
    with progress.watch():
        core, max_model_len = _load(config, memory, progress, node, is_restart)
    core.probe()
    memory.settle(core)
    profile = _profile(core, config)
    reservations = Reservations(
        core.blocks,
        session_blocks=profile.session_kv_bytes // profile.block_bytes
        if profile.block_bytes
        else 0,
        session_idle_s=config.memory.session_idle,
        clock=time.monotonic,
    )
    limits = _limits(core, config, memory)
    kv_space = _kv_space(core, config, profile, host_tier) if host_tier else b""
    tiers = None
    if kv_space:
        tiers = core.use_tiers(kv_space, profile.block_tokens, profile.block_bytes)
        memory.attached()
    engine = VllmEngine(core, profile, limits, reservations, tiers=tiers)
    if not is_restart:
        _check_adapters(engine, limits.adapters, report)
    return Started(
        engine=engine,
        core=core,
        ledger=memory.ledger,
        used_bytes=memory.used_bytes,
        free_memory=FreeMemoryMonitor(
            memory.free_bytes,
            config.memory.safety_reserve,
            time.monotonic,
            memory.allocator_bytes,
        ),
        profile=profile,
        max_model_len=max_model_len,
        name=config.model.name,
        ranks=core.ranks,
        kv_space=kv_space,
    )


def _limits(core: vllm_core.VllmCore, config: EngineConfig, memory: StartMemory) -> EngineLimits:
    return EngineLimits(
        max_model_len=core.max_model_len,
        max_sequences=config.batching.max_sequences,
        lookahead_tokens=core.lookahead_tokens,
        shares_prompts=core.has_prefix_cache,
        keeps_prompts=config.memory.prefix_cache,
        adapters=tuple(each.name for each in config.adapters),
        adapter_slots=memory.adapter_slots,
    )


def compute(config: EngineConfig, node: Node, rank_bytes: int) -> None:
    """Computes a follower's part until one of its ranks ends.

    `rank_bytes`: memory of a rank's device on the leader.

    Raises:
        WorkerStartError, LedgerError, WeightsError: one line saying what to change.
    """
    _prepare(config)
    # Ranks read them where the leader does, which says so if one cannot.
    adapter_folders(config.adapters, may_lack=True)
    dtype = vllm_core.resolve_dtype(config.model.dtype)
    files = resolve_source(config.model.source)
    folder = checkpoint_folder(files, dtype, Path(config.server.weights_dir))
    memory = StartMemory(config)
    memory.plan_adapters(folder, dtype, rank_bytes)
    share, slots = memory.device_share, memory.adapter_slots
    given = arguments.engine_args(config, folder, dtype, share, node, slots)
    vllm_core.compute(vllm_core.make_config(given, headless=True))


def _prepare(config: EngineConfig) -> None:
    """Checks what can be checked before anything is loaded, and clears what killed ranks left.

    Raises:
        WorkerStartError: this vLLM does not take the configuration.
    """
    vllm_core.check_version()
    arguments.check(config)
    vllm_core.check_device(config.device)
    sweep()


def _load(
    config: EngineConfig,
    memory: StartMemory,
    progress: "_Progress",
    node: Node | None,
    is_restart: bool,
) -> tuple[vllm_core.VllmCore, int]:
    """Returns vLLM's engine and the longest sequence of the model as configured, tokens."""
    progress.begin("weights")
    dtype = vllm_core.resolve_dtype(config.model.dtype)
    files = resolve_source(config.model.source)
    folder = checkpoint_folder(files, dtype, Path(config.server.weights_dir), progress.repeat)
    adapters = adapter_folders(config.adapters, may_lack=is_restart)
    memory.plan_adapters(folder, dtype, memory.rank_bytes)
    share, slots = memory.device_share, memory.adapter_slots
    vllm_config = vllm_core.make_config(
        arguments.engine_args(config, folder, dtype, share, node, slots), memory.host_tier
    )
    max_model_len = vllm_config.model_config.max_model_len
    progress.begin("weights", _weight_bytes(folder))
    core = vllm_core.VllmCore(
        vllm_config,
        memory.size_pool,
        adapters,
        partial(_load_vocabulary, files.path),
        progress.begin,
    )
    return core, max_model_len


def _check_adapters(engine: VllmEngine, names: tuple[str, ...], report: Report) -> None:
    """Loads every adapter once, so that one that is broken is an error of the start; the last ones
    stay loaded.

    Raises:
        WorkerStartError: one cannot be loaded.
    """
    for index, name in enumerate(names):
        report(Loading(stage="adapters", done_bytes=index, total_bytes=len(names)))
        try:
            engine.adapters.load(name)
        except AdapterError as error:
            raise WorkerStartError(
                f"adapters: adapter {name} cannot be loaded: {error.reason}; mend its files"
            ) from error
    if names:
        report(Loading(stage="adapters", done_bytes=len(names), total_bytes=len(names)))


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _load_vocabulary(path: Path, vocab_size: int) -> LLTokenizer:
    try:
        return vocabulary(load_tokenizer(path), vocab_size)
    except (TokenizerError, WeightsError) as error:
        raise GrammarError(str(error)) from error


def _profile(core: vllm_core.VllmCore, config: EngineConfig) -> MemoryProfile:
    groups = core.groups
    sizes = {each.block_tokens for each in groups if not each.state_blocks}
    if len(sizes) > 1:
        raise WorkerStartError(
            f"model.source: its layers keep KV in blocks of {sorted(sizes)} tokens, whose memory "
            "cannot be predicted together; set vllm.args.block_size"
        )
    block_tokens = max(sizes, default=1)
    # A block of the pool takes as much whichever group has it.
    per_token = -(-core.block_bytes // block_tokens)
    return MemoryProfile(
        block_tokens=block_tokens,
        groups=tuple(
            CacheGroup(per_token, window_tokens=each.window_tokens, state_blocks=each.state_blocks)
            for each in groups
        ),
        prefill_chunk_tokens=core.max_in_flight_tokens,
        kv_pool_bytes=core.blocks.num_blocks * per_token * block_tokens,
        session_kv_bytes=config.memory.session_kv_limit,
        copies_shared_block=False,
        decode_tokens=core.max_decode_tokens,
    )


def _kv_space(
    core: vllm_core.VllmCore, config: EngineConfig, profile: MemoryProfile, host_tier: HostTier
) -> bytes:
    """Returns the namespace of the KV that is kept outside the device: all that the bytes of a
    block depend on beside its tokens. Empty: none is kept."""
    try:
        block_bytes, facts = core.tier_format()
    except TiersRefusedError as error:
        log.info("memory.tiers: the model's KV stays on its device: %s", error)
        return b""
    if block_bytes > profile.block_bytes:
        log.info("memory.tiers: the model's KV stays on its device: ranks keep more of a block")
        return b""
    if host_tier.num_bytes < profile.block_bytes:
        return b""
    model = config.model
    return namespace(
        {
            "weights": source_key(resolve_source(model.source), f"vllm {model.quantization}"),
            "dtype": core.dtype,
            "kv_dtype": model.kv_dtype,
            "max_model_len": model.max_model_len,
            "vllm": vllm_core.VERSION,
            # They may say how positions are computed, and much else.
            "args": config.vllm.args,
            "block_tokens": profile.block_tokens,
            "block_bytes": block_bytes,
            "tensor": config.parallelism.tensor,
            "device": "cpu" if vllm_core.is_cpu() else "cuda",
            "format": facts,
        }
    )


class _Progress:
    """Tells the server that a start goes on: vLLM says nothing while it loads."""

    def __init__(self, report: Report, used_bytes: Callable[[], int]) -> None:
        self._report = report
        self._used_bytes = used_bytes
        self._lock = threading.Lock()
        self._stage = ""
        self._total = self._first = self._most = 0

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Ends the stage before, and begins one that is going to take so many bytes; 0: unknown."""
        with self._lock:
            self._end()
            self._stage, self._total = stage, total_bytes
            self._first = self._most = self._used_bytes()
            self._send(0, total_bytes or 1)

    def repeat(self) -> None:
        """Reports the stage once more, in which another process is waited for."""
        with self._lock:
            self._send(0, self._total or 1)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Reports the bytes in use or written every second as long as they grow."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_PROGRESS_S):
                with self._lock:
                    used = self._used_bytes()
                    if used > self._most and self._stage:
                        self._most = used
                        total = self._total or 1
                        self._send(min(used - self._first, total - 1), total)

        thread = threading.Thread(target=look, name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self._end()

    def _end(self) -> None:
        if self._stage:
            self._send(self._total, self._total)

    def _send(self, done: int, total: int) -> None:
        self._report(Loading(stage=self._stage, done_bytes=done, total_bytes=total))
