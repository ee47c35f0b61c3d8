"""A worker whose startup is complete: its engine, and the memory and model that it reports."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ullage_common.request_cost import MemoryProfile
from ullage_common.wire.fingerprint import Fingerprint
from ullage_engine.memory.ledger import Ledger
from ullage_engine.memory.pressure import FreeMemoryMonitor
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import RankPlace, WorkerState
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.worker.engine import EngineCore

log = logging.getLogger("ullage.engine.worker")


@dataclass(frozen=True, slots=True)
class Started:
    """A loaded engine with its memory ledger, memory profile and ranks."""

    engine: EngineCore
    ledger: Ledger
    """Memory reservations of all ranks together."""
    used_bytes: Callable[[], int]
    """Function that returns the number of bytes in use, measured at most a second ago.

    On a CPU, these are all ranks' resident bytes. On a GPU, they are rank 0's bytes on its device.
    """
    swap_seconds: Callable[[], float]
    """Function that returns how many seconds rank 0 has spent copying KV to and from host
    memory."""
    swap_bytes_per_second: float
    """Bandwidth to host memory in bytes per second, measured at startup, or 0 without host memory
    for KV."""
    free_memory: FreeMemoryMonitor
    """Monitors how much memory other processes use on rank 0's device."""
    stop_ranks: Callable[[], None]
    """Function that stops the other ranks."""
    throughput: ThroughputEstimator
    profile: MemoryProfile
    max_model_len: int
    vocab_size: int
    dtype: str
    name: str
    """Name that clients use to request the model."""
    ranks: list[RankPlace]
    fingerprint: Fingerprint
    """Fingerprint of everything that affects the exact bits of the engine's answers."""
    kv_space: bytes
    """Namespace of KV blocks in tiers outside the device, or empty without tiers."""
    longest_step_s: float
    """Duration of the longest step in seconds, measured at startup."""

    def state(self) -> WorkerState:
        """End idle sessions, and return the current memory usage and load.

        If other processes have taken memory, withhold the same amount of KV from new requests.
        """
        engine = self.engine
        scheduler = self.engine.scheduler
        missing = self.free_memory.missing_bytes()
        scheduler.end_idle_sessions()
        scheduler.withhold(missing)

        return WorkerState(
            **msgspec.structs.asdict(scheduler.stats()),
            total_bytes=self.ledger.total_bytes,
            threshold=self.ledger.threshold,
            decode_tokens_per_second=self.throughput.decode_tokens_per_second,
            prefill_tokens_per_second=self.throughput.prefill_tokens_per_second,
            step_seconds=self.throughput.step_seconds,
            num_oom_events=engine.num_oom_events,
            num_nonfinite_logits=engine.num_nonfinite_logits,
            num_overlapped_steps=engine.num_overlapped_steps,
            releases=scheduler.releases(),
            ledger=self.ledger.states(),
            rss_bytes=self.used_bytes(),
            swap_seconds=self.swap_seconds(),
            swap_bytes_per_second=self.swap_bytes_per_second,
            kv_withheld_bytes=missing,
        )

    def ready(self, state: WorkerState) -> Ready:
        """Return the message that describes the model, the worker and its initial state."""
        return Ready(
            profile=self.profile,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            ranks=self.ranks,
            fingerprint=self.fingerprint,
            kv_space=self.kv_space,
            longest_step_s=self.longest_step_s,
            state=state,
        )

    def log_start(self) -> None:
        """Log the model's properties, and which device computes which part of it."""
        for place in self.ranks:
            log.info("%s", place)
        facts = {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "fingerprint": self.fingerprint.digest,
        }
        log.info("worker serves %s", self.name, extra=facts)

    def stop(self) -> None:
        """Stop the other ranks."""
        self.stop_ranks()
