"""The worker's startup, from a configuration to an engine that serves on one or more ranks.

Rank 0 starts the processes of the other ranks, and sends them a command for each startup phase.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ullage_common.config.engine import EngineConfig
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.memory.ledger import Ledger, LedgerError
from ullage_engine.memory.pressure import FreeMemoryMonitor
from ullage_engine.model_config.dtypes import dtype_name
from ullage_engine.model_loader.proof import Proof, confirm
from ullage_engine.parallel.layout import device_map, group_state_bytes
from ullage_engine.protocol.errors import (
    ProofError,
    RankFailedError,
    WeightsError,
    WorkerStartError,
)
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.engine import EngineCore, PipelinedEngine, Runner
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.grammar import Grammars
from ullage_engine.worker.rank import RankStartup
from ullage_engine.worker.rank_group import (
    Allocate,
    DistributedRunner,
    Done,
    Finalize,
    Join,
    RankProcesses,
    Report,
    WarmUp,
)
from ullage_engine.worker.started import Started
from ullage_engine.worker.vocabulary import vocabulary_of

log = logging.getLogger("ullage.engine.worker")

_FAILURE_GRACE_S = 2.0
"""Seconds to wait after an error on rank 0 for another rank to report the cause."""

StartRank = Callable[[int, str, int | None], ForkedProcess]
"""Function that starts a rank's process, given its number, endpoint and CPU memory budget."""


def start(
    config: EngineConfig,
    report: Report,
    group_path: Path,
    start_rank: StartRank,
    host_tier: HostTier | None = None,
) -> Started:
    """Load the model, size every buffer, and return an engine that is ready for requests.

    Args:
        config: the engine's configuration.
        report: called with the progress of startup.
        group_path: path prefix of the other ranks' sockets.
        start_rank: starts the processes of the other ranks.
        host_tier: memory of the host tier, or None without a host tier.

    Raises:
        WorkerStartError, LedgerError, WeightsError: the engine cannot serve. The message is one
            line that says how to fix this.
        RankFailedError: another rank failed unexpectedly, so a restart may succeed.
        ProofError: a rank's results differ from those of a verified start.
    """
    own = RankStartup(config, 0, report, host_tier)
    if own.layout.world == 1:
        own.load()
        own.allocate_arenas()
        num_blocks = own.warm_up()
        own.allocate_kv(num_blocks)
        verified = own.proof_file.read()
        own.finalize(verifies=verified is None)
        _confirm(own, verified, [])
        used_bytes = own.meter.recent_bytes
        return _started(own, own.runner, num_blocks, own.ledger, used_bytes, own.close)

    # The budget is decided before any other rank takes memory. Otherwise it would depend on the
    # order in which ranks load.
    budget = own.ledger.total_bytes if own.device.type == "cpu" else None

    def start_with_budget(rank: int, endpoint: str) -> ForkedProcess:
        return start_rank(rank, endpoint, budget)

    processes = RankProcesses(own.layout.world, group_path, start_with_budget, report)
    try:
        return _start_group(own, processes, group_path)
    except BaseException as error:
        cause = _start_error(error, processes)
        processes.kill()
        if cause is None:
            raise
        raise cause from error


def _start_error(error: BaseException, processes: RankProcesses) -> Exception | None:
    """Return the error of another rank that made this startup fail, or None if there is none.

    If one rank exits in the middle of a collective computation, the others fail as well, so `error`
    may only be a consequence.
    """
    own = (WorkerStartError, LedgerError, WeightsError, ProofError)
    if isinstance(error, own) or not isinstance(error, Exception):
        return None

    failed = (
        error if isinstance(error, RankFailedError) else processes.wait_failure(_FAILURE_GRACE_S)
    )
    if failed is None or failed.may_retry:
        return None if failed is error else failed
    return WorkerStartError(str(failed))


def _start_group(own: RankStartup, processes: RankProcesses, group_path: Path) -> Started:
    """Start all ranks phase by phase, and return the loaded engine.

    All ranks finish a phase before any of them begins the next.
    """
    own.load()
    if any(answer.weights_key != own.weights_key for answer in processes.wait_done()):
        # The source may have changed meanwhile. The next start maps one file for all ranks.
        raise RankFailedError("ranks have prepared the weights differently", may_retry=True)

    store = group_path.with_name(group_path.name + ".store")
    # A group that was killed leaves its file behind.
    store.unlink(missing_ok=True)
    processes.broadcast(Join(str(store)))
    own.allocate_arenas(store)
    processes.wait_done()

    processes.broadcast(WarmUp())
    num_blocks = min(own.warm_up(), *(answer.num_blocks for answer in processes.wait_done()))

    processes.broadcast(Allocate(num_blocks))
    own.allocate_kv(num_blocks)
    processes.wait_done()

    verified = own.proof_file.read()
    processes.broadcast(Finalize(verifies=verified is None))
    own.finalize(verifies=verified is None)
    answers = processes.wait_done()
    _confirm(own, verified, answers)

    ledger = group_ledger(own.ledger, answers)

    def used_bytes() -> int:
        others = processes.resident_bytes() if own.device.type == "cpu" else 0
        return own.meter.recent_bytes() + others

    def stop() -> None:
        processes.stop()
        own.close()

    max_sequences = own.config.batching.max_sequences
    runner = DistributedRunner(own.runner, processes, own.layout, max_sequences)
    return _started(own, runner, num_blocks, ledger, used_bytes, stop)


def _confirm(own: RankStartup, verified: list[Proof] | None, others: list[Done]) -> None:
    """Check all ranks' computed results (proofs) against those of a verified start.

    If no start has been verified before, store the proofs of this start for later starts.

    Raises:
        ProofError: a rank's results differ from those of the verified start.
    """
    of_ranks = (own.proof, *(answer.proof for answer in others))
    proofs = [each for each in of_ranks if each is not None]
    confirm(own.proof_file, verified, proofs, own.proof_tolerance)


def _started(
    own: RankStartup,
    runner: Runner,
    num_blocks: int,
    ledger: Ledger,
    used_bytes: Callable[[], int],
    stop: Callable[[], None],
) -> Started:
    """Build the engine from its parts after the last startup phase, and return it."""
    memory = own.config.memory
    profile = _profile(own, num_blocks)
    throughput = ThroughputEstimator()

    policy = KvPolicy(
        prefix_cache=memory.prefix_cache,
        session_blocks=profile.session_kv_bytes // profile.block_bytes,
        session_idle=memory.session_idle,
        host_slots=own.num_host_slots,
        kv_space=own.kv_space,
        prefetch=own.layout.world == 1,
    )
    if own.swap_bytes_per_second:
        policy = replace(policy, swap_bytes_per_second=own.swap_bytes_per_second)

    output_lengths = OutputLengthEstimator(own.max_model_len)
    limits = replace(
        own.limits,
        decode_tokens=own.decode_tokens,
        prompt_tokens=own.prompt_tokens,
        prompt_cost=own.prompt_cost,
    )
    scheduler = Scheduler(profile, limits, throughput, output_lengths, policy)
    scheduler.events.about = {"limits": limits.as_json(), "longest_step_s": own.longest_step_s}

    return Started(
        engine=_engine(scheduler, runner, throughput, own),
        ledger=ledger,
        used_bytes=used_bytes,
        swap_seconds=lambda: own.runner.swap_seconds,
        swap_bytes_per_second=own.swap_bytes_per_second,
        free_memory=FreeMemoryMonitor(
            own.meter.free_bytes, memory.safety_reserve, time.monotonic, own.meter.reserved_bytes
        ),
        stop_ranks=stop,
        throughput=throughput,
        profile=profile,
        max_model_len=own.max_model_len,
        vocab_size=own.model_config.vocab,
        dtype=dtype_name(own.dtype),
        name=own.config.model.name,
        ranks=device_map(own.model_config, own.layout, own.device.type),
        fingerprint=own.fingerprint,
        kv_space=own.kv_space,
        longest_step_s=own.longest_step_s,
    )


def _engine(
    scheduler: Scheduler, runner: Runner, throughput: ThroughputEstimator, own: RankStartup
) -> EngineCore:
    if own.config.batching.num_speculative_tokens and scheduler.speculation is None:
        log.warning(
            "batching.numSpeculativeTokens has no effect: a model with convolutions or sliding "
            "windows, or a pipeline, has no draft tokens; set 0"
        )

    grammars = _grammars(own)
    max_in_flight = own.limits.max_in_flight
    if max_in_flight == 1 or not isinstance(runner, DistributedRunner):
        restore = own.workspace.restore
        return EngineCore(scheduler, runner, throughput, grammars, restore)
    return PipelinedEngine(scheduler, runner, throughput, grammars, max_in_flight=max_in_flight)


def _grammars(own: RankStartup) -> Grammars:
    source = own.config.model.source
    vocab_size = own.model_config.vocab
    return Grammars(lambda: vocabulary_of(source, vocab_size))


def group_ledger(own: Ledger, others: list[Done]) -> Ledger:
    """Combine all ranks' ledgers into one for reports, by summing each reservation over the ranks.

    The sum does not mean that ranks share memory. Each rank still has its own budget.
    """
    total = own.total_bytes + sum(answer.total_bytes for answer in others)
    ledger = Ledger(total, own.threshold, configurable=True)
    entries = [own.states(), *(answer.ledger for answer in others)]

    # A stage may have reservations that the other stages lack, for example convolution states.
    for name in dict.fromkeys(entry.name for each in entries for entry in each):
        same = [entry for each in entries for entry in each if entry.name == name]
        if same[0].on_host:
            ledger.record_on_host(name, sum(entry.reserved_bytes for entry in same))
            continue

        ledger.reserve(name, sum(entry.reserved_bytes for entry in same))
        ledger.allocated(name, sum(entry.allocated_bytes for entry in same))

    return ledger


def _profile(own: RankStartup, num_blocks: int) -> MemoryProfile:
    """Return the memory profile, which tells admission and the router how much requests cost."""
    limits = own.limits
    runner = own.runner

    per_token = own.block_bytes // own.step_limits.block_tokens
    groups = [CacheGroup(per_token)]
    if own.window_tokens:
        groups.append(CacheGroup(per_token, own.window_tokens))
    state_bytes = group_state_bytes(own.model_config, own.layout, own.dtype.itemsize)

    profile = MemoryProfile(
        block_tokens=own.step_limits.block_tokens,
        groups=tuple(groups),
        state_bytes_per_sequence=state_bytes,
        activation_bytes_per_token=runner.step_arena_bytes // own.step_limits.max_tokens,
        sampler_bytes_per_sequence=runner.sampler_arena_bytes // limits.max_sequences,
        # The configured limit, since the measured one differs from engine to engine.
        prefill_chunk_tokens=limits.prompt_tokens,
        kv_pool_bytes=num_blocks * own.block_bytes,
        session_kv_bytes=own.config.memory.session_kv_limit,
    )
    assert profile.block_bytes == own.block_bytes, "priced and allocated blocks differ"
    return profile
