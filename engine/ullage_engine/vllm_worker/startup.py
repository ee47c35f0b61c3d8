"""Starts a worker: builds vLLM's engine and its memory ledger from a configuration."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from llguidance import LLTokenizer

from ullage_common.config.engine import EngineConfig
from ullage_common.request_cost import CacheGroup, MemoryProfile, sample_blocks
from ullage_common.wire.fingerprint import Fingerprint, fingerprint_of
from ullage_engine.memory.ledger import Ledger, mib
from ullage_engine.memory.out_of_memory import is_out_of_memory
from ullage_engine.memory.pressure import FreeMemoryMonitor
from ullage_engine.model_loader import digest
from ullage_engine.model_loader.files import check_for_vllm
from ullage_engine.model_loader.loader import check_unchanged, source_key
from ullage_engine.model_loader.proof import ProofFile, confirm, tolerance
from ullage_engine.model_loader.source import model_version, resolve_source
from ullage_engine.protocol.errors import (
    MemoryShortError,
    ProofError,
    WeightsError,
    WorkerStartError,
)
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import RankPlace, WorkerState
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer
from ullage_engine.vllm_worker import arguments
from ullage_engine.vllm_worker.adapters import fetch_adapters
from ullage_engine.vllm_worker.arguments import Node
from ullage_engine.vllm_worker.bindings import core as vllm_core
from ullage_engine.vllm_worker.checkpoint import checkpoint_folder, written_bytes
from ullage_engine.vllm_worker.engine import VllmEngine
from ullage_engine.vllm_worker.fingerprint import Backend, engine_facts
from ullage_engine.vllm_worker.group import announce_loaded, lead
from ullage_engine.vllm_worker.interface import CoreOutput
from ullage_engine.vllm_worker.memory import StartMemory
from ullage_engine.vllm_worker.oom_backoff import OomBackoff, Taken
from ullage_engine.vllm_worker.progress import StartProgress
from ullage_engine.vllm_worker.proof import Probe, proof_file, take_proofs
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.sequence import EngineLimits
from ullage_engine.vllm_worker.shared_memory import SharedMemory, shared_memory_of
from ullage_engine.vllm_worker.tiers import TiersRefusedError
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.grammar import GrammarError, vocabulary
from ullage_engine.worker.loop import Report
from ullage_kv import namespace

log = logging.getLogger("ullage.engine.vllm")


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """A started vLLM engine, with its memory ledger, memory profile and ranks."""

    engine: VllmEngine
    core: vllm_core.VllmCore
    ledger: Ledger
    """Memory reservations, summed over all ranks."""
    used_bytes: Callable[[], int]
    free_memory: FreeMemoryMonitor
    """Monitors how much memory other processes take on rank 0's device."""
    profile: MemoryProfile
    max_model_len: int
    name: str
    """Name by which clients request the model."""
    ranks: list[RankPlace]
    fingerprint: Fingerprint
    """Fingerprint of everything that affects the answers bit for bit."""
    shared_memory: SharedMemory
    backoff: OomBackoff
    kv_space: bytes = b""
    """Namespace of the KV blocks in tiers outside the device. Empty without tiers."""
    num_oom_events: int = 0
    """Number of earlier out-of-memory errors that no worker has reported.

    If this worker runs out of memory, it exits, and the server counts the error from the exit
    status.
    """

    def state(self) -> WorkerState:
        """Return the worker's state, with current measurements of memory and load.

        This also ends idle sessions. If other processes have taken memory, it withholds the same
        amount of KV from new requests.

        Raises:
            GroupLostError: a rank's process has exited.
        """
        self.core.check_ranks()
        engine = self.engine
        missing = self.free_memory.missing_bytes()
        engine.reservations.end_idle_sessions()
        engine.withhold(missing)
        return WorkerState(
            **msgspec.structs.asdict(engine.stats()),
            total_bytes=self.ledger.total_bytes,
            threshold=self.ledger.threshold,
            decode_tokens_per_second=engine.throughput.decode_tokens_per_second,
            prefill_tokens_per_second=engine.throughput.prefill_tokens_per_second,
            step_seconds=engine.throughput.step_seconds,
            num_oom_events=self.num_oom_events,
            releases=engine.releases(),
            ledger=self.ledger.states(),
            rss_bytes=self.used_bytes(),
            kv_withheld_bytes=missing,
        )

    def ready(self, state: WorkerState) -> Ready:
        """Return the message that describes the served model and the worker's initial state."""
        return Ready(
            profile=self.profile,
            max_model_len=self.max_model_len,
            vocab_size=self.core.vocab_size,
            dtype=self.core.dtype,
            ranks=self.ranks,
            task=self.core.task,
            fingerprint=self.fingerprint,
            kv_space=self.kv_space,
            # vLLM starts a request with the blocks that its connector has, and computes the rest.
            computes_beside_loads=False,
            longest_step_s=self.core.longest_step_s,
            state=state,
        )

    def log_start(self) -> None:
        """Log the device map and the served model."""
        for place in self.ranks:
            log.info("%s", place)
        facts = {
            "dtype": self.core.dtype,
            "max_model_len": self.max_model_len,
            "fingerprint": self.fingerprint.digest,
        }
        log.info("worker serves %s with vLLM %s", self.name, vllm_core.VERSION, extra=facts)

    def on_failed_step(self, error: Exception) -> None:
        """Record a failed step, so that the next worker knows why this worker is exiting.

        Raises:
            MemoryShortError: the step ran out of memory while other processes held part of the
                device's memory.
        """
        self.backoff.on_failed_step(error)
        if is_out_of_memory(error) and (missing := self.free_memory.missing_bytes()):
            raise MemoryShortError(f"others took {mib(missing)} of the device") from error

    def stop(self) -> None:
        """Stop the other ranks' processes."""
        self.core.close()
        self.shared_memory.close()


def start(
    config: EngineConfig,
    report: Report,
    host_tier: HostTier | None = None,
) -> StartedVllm:
    """Load the model, size the KV pool and return an engine that is ready to run steps.

    Args:
        config: the engine's configuration.
        report: called with startup progress.
        host_tier: memory for KV outside the device. None without a host tier.

    Raises:
        WorkerStartError, LedgerError, WeightsError: startup failed. The message is one line that
            says how to fix it.
        ProofError: this startup's results differ from those of a verified startup.
    """
    shared_memory = _prepare(config)
    backoff = OomBackoff(Path(config.server.run_dir))
    try:
        return _start(config, report, host_tier, shared_memory, backoff)
    except Exception as error:
        backoff.on_failed_start(error)
        raise


def _start(
    config: EngineConfig,
    report: Report,
    host_tier: HostTier | None,
    shared_memory: SharedMemory,
    backoff: OomBackoff,
) -> StartedVllm:
    # The memory, the other nodes, and the model.
    memory = StartMemory(config, host_tier, backoff.limits)
    nodes = config.group.nodes
    version = model_version(config.model.source)
    node = lead(config.group, report, memory.rank_bytes, version) if nodes > 1 else None
    weights_dir = Path(config.server.weights_dir)
    progress = StartProgress(report, lambda: memory.used_bytes() + written_bytes(weights_dir))
    with progress.watch():
        loaded = _load(config, memory, progress, node)
    core = loaded.core
    if chunk_tokens := backoff.limits.chunk_tokens:
        core.limit_chunk(chunk_tokens)

    # The probe's outputs prove below that this start computes like a verified one.
    probe = core.probe_size
    outputs = core.run_probe(probe)
    memory.settle(core)
    profile = _profile(core, config)
    backoff.took(_taken(core, profile))

    block_bytes = profile.block_bytes
    reservations = Reservations(
        core.blocks,
        session_blocks=profile.session_kv_bytes // block_bytes if block_bytes else 0,
        session_idle_s=config.memory.session_idle,
        clock=time.monotonic,
    )
    limits = _limits(core, config, memory)

    # A worker that computes differently from a verified start must not serve.
    content = loaded.weights_digest(progress.repeat)
    facts = _facts(core, config, content)
    proofs = proof_file(weights_dir, content, facts, probe, loaded.arguments)
    _prove(core, probe, outputs, proofs)

    kv_space = _kv_space(core, facts, profile, host_tier) if host_tier else b""
    tiers = None
    if kv_space:
        tiers = core.use_tiers(kv_space, profile.block_tokens, profile.block_bytes)
        memory.attached()

    engine = VllmEngine(core, profile, limits, reservations, tiers=tiers)
    started = StartedVllm(
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
        max_model_len=loaded.max_model_len,
        name=config.model.name,
        ranks=core.ranks,
        fingerprint=fingerprint_of(facts),
        shared_memory=shared_memory,
        backoff=backoff,
        kv_space=kv_space,
        num_oom_events=backoff.take_unreported(),
    )
    engine.on_failed_step = started.on_failed_step
    return started


def _prove(
    core: vllm_core.VllmCore, probe: Probe, outputs: list[CoreOutput], file: ProofFile
) -> None:
    """Compare this startup's results with the verified ones, or store them if none exist yet.

    Raises:
        ProofError: this startup's results differ from those of the verified startup.
    """
    bound = tolerance(getattr(torch, core.dtype), is_exact=False)
    verified = file.read()
    try:
        proofs = take_proofs(core, probe, outputs, bound, verifies=verified is None)
        confirm(file, verified, proofs, bound)
    except ProofError:
        core.close()
        raise


def _taken(core: vllm_core.VllmCore, profile: MemoryProfile) -> Taken:
    """Return this worker's KV pool size and prompt chunk size, with their lower bounds.

    If this worker runs out of memory, the next worker's limits are derived from these values.
    """
    longest = core.max_model_len + core.lookahead_tokens
    # The pool never hands out one of its blocks.
    num_blocks = sample_blocks(profile, longest) + 1 if profile.block_bytes else 0
    return Taken(
        kv_bytes=core.pool_bytes,
        least_kv_bytes=min(core.pool_bytes, num_blocks * core.block_bytes),
        chunk_tokens=core.chunk_tokens,
        least_chunk_tokens=max((each.block_tokens for each in core.groups), default=0),
    )


def _limits(core: vllm_core.VllmCore, config: EngineConfig, memory: StartMemory) -> EngineLimits:
    return EngineLimits(
        max_model_len=core.max_model_len,
        max_sequences=config.batching.max_sequences,
        lookahead_tokens=core.lookahead_tokens,
        shares_prompts=core.has_prefix_cache,
        keeps_prompts=config.memory.prefix_cache,
        adapter_slots=memory.adapter_slots,
    )


def compute(config: EngineConfig, node: Node, rank_bytes: int) -> None:
    """Run a follower's ranks until one of them exits.

    Args:
        config: the engine's configuration.
        node: this node's place in the group.
        rank_bytes: device memory per rank on the leader, in bytes.

    Raises:
        WorkerStartError, LedgerError, WeightsError: startup failed. The message is one line that
            says how to fix it.
    """
    _prepare(config, node.rank)
    if config.max_loras:
        fetching = threading.Thread(target=fetch_adapters, args=(config,), daemon=True)
        fetching.start()
    dtype = vllm_core.resolve_dtype(config.model.dtype)
    files = resolve_source(config.model.source)
    check_for_vllm(files, config.vllm.args)
    folder = checkpoint_folder(files, dtype, Path(config.server.weights_dir))
    memory = StartMemory(config)
    memory.plan_adapters(folder, dtype, rank_bytes)
    share = memory.device_share
    slots = memory.adapter_slots
    given = arguments.engine_args(config, folder, dtype, share, node, slots)
    vllm_core.compute(vllm_core.make_config(given, headless=True), announce_loaded)


def _prepare(config: EngineConfig, node: int = 0) -> SharedMemory:
    """Check the configuration before loading, and remove killed ranks' shared-memory files.

    Args:
        config: the engine's configuration.
        node: index of this node in the engine.

    Returns:
        The tracker of the engine's shared-memory files on this node.

    Raises:
        WorkerStartError: the installed vLLM does not support the configuration.
    """
    vllm_core.check_version()
    arguments.check(config)
    vllm_core.check_device(config.device)
    shared_memory = shared_memory_of(config.server, node)
    shared_memory.sweep()
    if config.gpus > 1:
        shared_memory.watch()
    return shared_memory


@dataclass(frozen=True, slots=True)
class _Loaded:
    """vLLM's engine, and the arguments and weights with which it was loaded."""

    core: vllm_core.VllmCore
    arguments: dict[str, Any]
    """Arguments of `vllm.EngineArgs`."""
    max_model_len: int
    """Maximum sequence length of the model as configured, in tokens."""
    weights_digest: digest.Wait
    """Function that waits until the digest of the weight files is known, and returns it."""


def _load(
    config: EngineConfig,
    memory: StartMemory,
    progress: StartProgress,
    node: Node | None,
) -> _Loaded:
    """Load the model. Return vLLM's engine with its arguments and weights."""
    progress.begin("weights")
    dtype = vllm_core.resolve_dtype(config.model.dtype)
    files = resolve_source(config.model.source)
    check_for_vllm(files, config.vllm.args)

    key = source_key(files, "load")
    weights_dir = Path(config.server.weights_dir)
    folder = checkpoint_folder(files, dtype, weights_dir, progress.repeat)
    weights_digest = digest.begin(partial(digest.model_digest, files, weights_dir))

    memory.plan_adapters(folder, dtype, memory.rank_bytes)
    share = memory.device_share
    slots = memory.adapter_slots
    given = arguments.engine_args(config, folder, dtype, share, node, slots)
    vllm_config = vllm_core.make_config(given, memory.host_tier)
    max_model_len = vllm_config.model_config.max_model_len

    progress.begin("weights", _weight_bytes(folder))
    core = vllm_core.VllmCore(
        vllm_config,
        memory.size_pool,
        partial(_load_vocabulary, files.path),
        progress.begin,
    )
    # The files may have been replaced while vLLM read them.
    check_unchanged(files, source_key(files, "load"), key)
    return _Loaded(core, given, max_model_len, weights_digest)


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
    # A block of the pool has the same number of bytes in every cache group.
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


def _facts(core: vllm_core.VllmCore, config: EngineConfig, weights: str) -> dict[str, str]:
    """Return the facts from which the engine's fingerprint is computed.

    These are all the facts that affect the exact bits of answers, except for LoRA adapters.

    Args:
        core: vLLM's engine.
        config: the engine's configuration.
        weights: digest of the weight files.
    """
    backend = Backend(
        version=vllm_core.VERSION,
        device="cpu" if vllm_core.is_cpu() else "cuda",
        processor=vllm_core.processor(),
        dtype=core.dtype,
        environment=vllm_core.environment(),
    )
    return engine_facts(config, resolve_source(config.model.source), weights, backend)


def _kv_space(
    core: vllm_core.VllmCore, facts: dict[str, str], profile: MemoryProfile, host_tier: HostTier
) -> bytes:
    """Return the namespace for the keys of KV blocks that are stored outside the device.

    The namespace is a digest of everything that determines a block's bytes, except for the tokens.

    Returns:
        The namespace, or empty bytes if no KV is kept outside the device.
    """
    try:
        block_bytes, block_format = core.tier_format()
    except TiersRefusedError as error:
        log.info("memory.tiers: the model's KV stays on its device: %s", error)
        return b""
    if block_bytes > profile.block_bytes:
        log.info("memory.tiers: the model's KV stays on its device: ranks keep more of a block")
        return b""
    if host_tier.num_bytes < profile.block_bytes:
        return b""
    return namespace(
        {
            # Requests with adapters keep no KV there.
            "fingerprint": fingerprint_of(facts).digest,
            "block_tokens": profile.block_tokens,
            "block_bytes": block_bytes,
            "format": block_format,
        }
    )
