"""The worker's report on its ranks, memory, load and counters."""

import msgspec

from ullage_engine.protocol.figures import Figures


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the device map: the layers and attention heads assigned to one rank."""

    rank: int
    stage: int
    tensor_rank: int
    device: str
    first_layer: int
    num_layers: int
    num_attention_layers: int
    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        last = self.first_layer + self.num_layers - 1
        return (
            f"rank {self.rank}  stage {self.stage}  tensor rank {self.tensor_rank}  "
            f"{self.device}  layers {self.first_layer}-{last} "
            f"({self.num_attention_layers} attend)  heads {self.num_heads}/{self.num_kv_heads}"
        )


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the memory ledger, in bytes."""

    name: str
    reserved_bytes: int
    allocated_bytes: int
    on_host: bool = False
    """Whether the memory is pinned host memory, which is not part of the device's budget."""


class ReleaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Estimate of how much memory running requests will release, and when."""

    after_s: float
    num_bytes: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's current memory use, and its counters since the worker started."""

    kv_pool_bytes: int
    kv_free_bytes: int
    """Size of all free KV blocks in bytes."""
    kv_reclaimable_bytes: int
    """KV bytes that are kept for reuse but evicted as soon as the memory is needed."""
    kv_committed_bytes: int
    """KV bytes that are reserved but not yet allocated, or withheld from new requests."""
    kv_used_bytes: int = 0
    """KV bytes occupied by tokens in allocated blocks. The rest of these blocks is wasted."""
    kv_peak_bytes: int = 0
    """Most KV bytes that block tables held in any step since the worker started (0: unknown)."""
    kv_peak_promised_bytes: int = 0
    """Most KV bytes that were held or reserved since the worker started (0: unknown).

    The bytes withheld from new requests are included.
    """
    num_running: int
    num_waiting: int
    num_steps: int
    """Number of non-empty steps committed since the worker started."""
    expected_output_tokens: int
    """Expected output length in tokens, for which admission reserves blocks."""
    prefill_backlog_tokens: int
    """Number of admitted requests' prompt tokens that have not been computed yet."""
    num_preemptions: int
    """Number of preemptions since the worker started."""
    num_swaps: int = 0
    """Number of preemptions that swapped KV to host memory since the worker started."""
    swap_out_bytes: int = 0
    """KV bytes copied to host memory since the worker started."""
    swap_in_bytes: int = 0
    """KV bytes copied back to the device since the worker started."""
    prefix_lookup_tokens: int = 0
    """Number of tokens looked up in the prefix cache when requests first started."""
    prefix_hit_tokens: int = 0
    """Number of looked-up tokens whose KV was cached."""
    prefix_merged_tokens: int = 0
    """Number of tokens whose KV was computed twice and then deduplicated."""
    num_draft_tokens: int = 0
    """Number of draft tokens verified since the worker started."""
    num_accepted_tokens: int = 0
    """Number of draft tokens that were accepted as output."""
    num_sessions: int = 0
    session_bytes: int = 0
    """KV bytes that sessions keep between their turns."""
    num_adapter_loads: int = 0
    """Number of LoRA adapters loaded since the worker started."""
    num_adapter_unloads: int = 0
    """Number of LoRA adapters unloaded to free their slot for another adapter."""
    figures: Figures = msgspec.field(default_factory=Figures)
    """Histograms of step times, batch sizes and queueing times since the worker started."""

    @property
    def headroom_bytes(self) -> int:
        """Return the KV bytes that a new request may use: free + reclaimable - committed."""
        available = self.kv_free_bytes + self.kv_reclaimable_bytes - self.kv_committed_bytes
        return max(0, available)

    @property
    def kv_held_bytes(self) -> int:
        """Return the size in bytes of the KV blocks that block tables use.

        Blocks that are free or only cached are not counted.
        """
        return max(0, self.kv_pool_bytes - self.kv_free_bytes - self.kv_reclaimable_bytes)

    @property
    def kv_waste_ratio(self) -> float:
        """Return the fraction of the space in used KV blocks that holds no tokens, from 0 to 1."""
        held = self.kv_held_bytes
        return max(0.0, 1.0 - self.kv_used_bytes / held) if held else 0.0


class WorkerState(SchedulerStats, frozen=True, kw_only=True):
    """The worker's current memory and load. See `ullage.headroom.v1.Headroom`."""

    total_bytes: int
    threshold: float
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    step_seconds: list[float] = []
    """Seconds per step when decoding 1 sequence, 2 to 3 sequences, 4 to 7 sequences, and so on.

    The list is empty until the durations have been measured.
    """
    pressure_level: int = 0
    """Current memory pressure level: 0 for no pressure, then 1 (mildest) and up."""
    batch_share: float = 1.0
    """Fraction of `batching.max_sequences` that may run concurrently, from 0 to 1."""
    batch_limit: float = 1.0
    """Latest upper bound on `batch_share` set by the server. 1 means no bound."""
    num_oom_events: int
    """Number of steps that ran out of memory since the worker started."""
    num_nonfinite_logits: int = 0
    """Number of requests that failed because of NaN or infinite logits since the worker started."""
    num_overlapped_steps: int = 0
    """Number of steps that started while later pipeline stages still computed an earlier step."""
    releases: list[ReleaseState]
    ledger: list[ReservationState]
    rss_bytes: int
    """Resident bytes of the worker's ranks. On CUDA, the device bytes used by rank 0."""
    swap_seconds: float = 0.0
    """Seconds that rank 0 has spent on swaps to and from host memory since the worker started."""
    swap_bytes_per_second: float = 0.0
    """Swap bandwidth of all ranks together, measured at startup. 0 without host memory for KV."""
    kv_withheld_bytes: int = 0
    """KV bytes withheld from new requests because other processes have taken device memory."""
