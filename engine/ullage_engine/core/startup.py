"""From a configuration to an engine that steps: rank 0 starts the others and waits for them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from ullage_engine.config import EngineConfig, MemorySection
from ullage_engine.core.device import StartError
from ullage_engine.core.engine import Engine, Runner
from ullage_engine.core.grammars import GrammarError, Grammars, vocabulary
from ullage_engine.core.pace import Pace
from ullage_engine.core.rank_startup import RankStartup, Report
from ullage_engine.core.scheduler import KvPolicy, Scheduler
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.ledger import Ledger, LedgerError
from ullage_engine.memory.predictor import block_bytes
from ullage_engine.messages import CacheGroupSpec, Profile
from ullage_engine.models.dtypes import dtype_name
from ullage_engine.parallel.commands import Allocate, Done, Join, Settle, WarmUp
from ullage_engine.parallel.errors import RankFailedError
from ullage_engine.parallel.followers import Followers
from ullage_engine.parallel.layout import RankPlace, device_map
from ullage_engine.parallel.runner import GroupRunner
from ullage_engine.parallel.sizes import group_kv_bytes, group_state_bytes
from ullage_engine.tokenizer import TokenizerError, load_tokenizer
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.source import resolve_source

log = logging.getLogger("ullage.engine.worker")

_TOLD_S = 2.0
"""Within this time of an error on rank 0 another rank has said what caused it."""

RankCommand = Callable[[int, str, int | None], Sequence[str]]
"""The command line of a rank, by its endpoint and, on a CPU, its budget in bytes."""


@dataclass(frozen=True, slots=True)
class Started:
    """A loaded engine and what is known of it."""

    engine: Engine
    ledger: Ledger
    """Of all ranks together."""
    used_bytes: Callable[[], int]
    """Memory in use now: resident bytes of all ranks, or used bytes of rank 0's CUDA device."""
    stop: Callable[[], None]
    """Ends the other ranks."""
    pace: Pace
    profile: Profile
    max_model_len: int
    vocab_size: int
    dtype: str
    ranks: list[RankPlace]


def start(config: EngineConfig, report: Report, group_path: Path, follower: RankCommand) -> Started:
    """Loads the model and sizes everything.

    Sockets of other ranks have paths that begin with `group_path`; `follower` is their command.

    Raises:
        StartError, LedgerError, WeightsError: one line saying what to change.
        RankFailedError: another rank met what nobody foresaw; another start may do better.
    """
    own = RankStartup(config, 0, report)
    if own.layout.world == 1:
        own.load()
        own.allocate_arenas()
        num_blocks = own.warm_up()
        own.allocate_kv(num_blocks)
        own.settle()
        meter = own.meter
        return _started(own, own.runner, num_blocks, own.ledger, meter.used_bytes, own.leave)
    # Decided before any other rank takes memory, or shares would depend on who loads when.
    budget = own.ledger.total_bytes if own.device.type == "cpu" else None

    def command(rank: int, endpoint: str) -> Sequence[str]:
        return follower(rank, endpoint, budget)

    followers = Followers(own.layout.world, group_path, command, report)
    try:
        return _start_group(own, followers, group_path)
    except BaseException as error:
        told = _told(error, followers)
        followers.kill()
        if told is None:
            raise
        raise told from error


def _told(error: BaseException, followers: Followers) -> Exception | None:
    """What another rank says of an error that ended the start: when one is gone the others fail
    too, in the middle of what they compute together. None: it speaks for itself."""
    own = (StartError, LedgerError, WeightsError)
    if isinstance(error, own) or not isinstance(error, Exception):
        return None
    failed = error if isinstance(error, RankFailedError) else followers.failure(_TOLD_S)
    if failed is None or failed.may_retry:
        return None if failed is error else failed
    return StartError(str(failed))


def _start_group(own: RankStartup, followers: Followers, group_path: Path) -> Started:
    """The phases of all ranks, each behind the one before."""
    own.load()
    followers.done()
    store = group_path.with_name(group_path.name + ".store")
    store.unlink(missing_ok=True)  # of a group that was killed
    followers.tell_all(Join(str(store)))
    own.allocate_arenas(store)
    followers.done()
    followers.tell_all(WarmUp())
    num_blocks = min(own.warm_up(), *(answer.num_blocks for answer in followers.done()))
    followers.tell_all(Allocate(num_blocks))
    own.allocate_kv(num_blocks)
    followers.done()
    followers.tell_all(Settle())
    own.settle()
    ledger = group_ledger(own.ledger, followers.done())

    def used_bytes() -> int:
        others = followers.resident_bytes() if own.device.type == "cpu" else 0
        return own.meter.used_bytes() + others

    def stop() -> None:
        followers.stop()
        own.leave()

    runner = GroupRunner(own.runner, followers, own.layout)
    return _started(own, runner, num_blocks, ledger, used_bytes, stop)


def _started(
    own: RankStartup,
    runner: Runner,
    num_blocks: int,
    ledger: Ledger,
    used_bytes: Callable[[], int],
    stop: Callable[[], None],
) -> Started:
    profile, pace = _profile(own, num_blocks), Pace()
    policy = _kv_policy(own.config.memory, block_bytes(profile), own.num_host_slots)
    scheduler = Scheduler(profile, own.limits, pace, ExpectedOutput(own.max_model_len), policy)
    return Started(
        engine=Engine(scheduler, runner, pace, _grammars(own)),
        ledger=ledger,
        used_bytes=used_bytes,
        stop=stop,
        pace=pace,
        profile=profile,
        max_model_len=own.max_model_len,
        vocab_size=own.geometry.vocab,
        dtype=dtype_name(own.dtype),
        ranks=device_map(own.geometry, own.layout, own.device.type),
    )


def _grammars(own: RankStartup) -> Grammars:
    source, vocab_size = own.config.model.source, own.geometry.vocab

    def load() -> LLTokenizer:
        try:
            return vocabulary(load_tokenizer(resolve_source(source).path), vocab_size)
        except (TokenizerError, WeightsError) as error:
            raise GrammarError(str(error)) from error

    return Grammars(load)


def group_ledger(own: Ledger, others: list[Done]) -> Ledger:
    """Reservations of all ranks, added up by name; every rank has kept within its own budget."""
    total = own.total_bytes + sum(answer.total_bytes for answer in others)
    ledger = Ledger(total, own.threshold, configurable=True)
    entries = [own.states(), *(answer.ledger for answer in others)]
    # A stage may have lines that others lack, such as states.
    for name in dict.fromkeys(entry.name for each in entries for entry in each):
        same = [entry for each in entries for entry in each if entry.name == name]
        ledger.reserve(name, sum(entry.reserved_bytes for entry in same))
        ledger.allocated(name, sum(entry.allocated_bytes for entry in same))
    return ledger


def _profile(own: RankStartup, num_blocks: int) -> Profile:
    settings, runner = own.settings, own.runner
    per_token, num_ranks = group_kv_bytes(own.geometry, own.layout, own.kv_itemsize)
    state_bytes, state_ranks = group_state_bytes(own.geometry, own.layout, own.dtype.itemsize)
    profile = Profile(
        block_tokens=settings.block_tokens,
        groups=[CacheGroupSpec(bytes_per_token=per_token, num_ranks=num_ranks)],
        state_bytes_per_sequence=state_bytes,
        state_ranks=state_ranks,
        activation_bytes_per_token=runner.step_arena_bytes // settings.max_step_tokens,
        sampler_bytes_per_sequence=runner.sampler_arena_bytes // settings.max_sequences,
        prefill_chunk_tokens=settings.max_step_tokens - settings.max_sequences,
        kv_pool_bytes=num_blocks * own.block_bytes,
    )
    assert block_bytes(profile) == own.block_bytes, "priced and allocated blocks differ"
    return profile


def _kv_policy(memory: MemorySection, block: int, num_host_slots: int) -> KvPolicy:
    return KvPolicy(
        prefix_cache=memory.prefix_cache,
        session_blocks=memory.session_kv_limit // block,
        session_idle=memory.session_idle,
        host_slots=num_host_slots,
    )
