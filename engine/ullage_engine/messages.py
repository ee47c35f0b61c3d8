"""Messages between the server process and its worker (msgpack over a ZeroMQ PAIR on ipc://).

The worker connects and sends `Loading` (any number), then `Ready` once or `StartFailed` once; from
then on the server sends `Submit` and `Cancel`, the worker `StepDone` after each step and `State`
when its memory changes. Every request of a `Submit` is answered by tokens ending with a finish, by
one `Rejected` or by one `RequestFailed`.
"""

from typing import Literal

import msgspec

from ullage_engine.core.request import EngineRequest
from ullage_engine.parallel.layout import RankPlace


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages."""


# server → worker ---------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    requests: list[EngineRequest]
    """Samples of one prompt, admitted together or refused together by one `Rejected` that names the
    first; of a beam search, its hypotheses from best to worst, answered when all are known."""
    resumed: bool = False
    """Admitted before, by a worker that is gone: waits for memory and is never rejected for lack
    of it."""


class Cancel(Message, frozen=True, kw_only=True):
    request_id: str
    is_answered: bool = False
    """It ended by a stop string, which only the server sees; else nobody waits for it any more."""


class Fault(Message, frozen=True, kw_only=True):
    """Raise torch.OutOfMemoryError inside a coming step."""

    after_steps: int


class Shutdown(Message, frozen=True, kw_only=True):
    """Exit with status 0."""


# worker → server ---------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    """Progress of the start: stage is weights, arena, warm_up or kv_pool."""

    stage: str
    done_bytes: int
    total_bytes: int
    rank: int = 0


class CacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: bytes of a token over all its layers, and its window (0 grows)."""

    bytes_per_token: int
    window_tokens: int = 0
    num_ranks: int = 1
    """Ranks among which these bytes are divided evenly, by layers and by heads."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory profile of the loaded model; see ullage.inference.v1.MemoryProfile."""

    block_tokens: int
    groups: list[CacheGroupSpec]
    state_bytes_per_sequence: int
    """Convolution state over all layers and ranks."""
    state_ranks: int = 1
    """Ranks among which it is divided evenly, by layers and by channels."""
    activation_bytes_per_token: int
    sampler_bytes_per_sequence: int
    prefill_chunk_tokens: int
    kv_pool_bytes: int


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger, bytes."""

    name: str
    reserved_bytes: int
    allocated_bytes: int


class ReleaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a running request is predicted to give back."""

    after_s: float
    num_bytes: int


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's memory and load at one moment; see ullage.headroom.v1.Headroom."""

    total_bytes: int
    threshold: float
    kv_pool_bytes: int
    kv_free_bytes: int
    kv_reclaimable_bytes: int
    kv_committed_bytes: int
    kv_used_bytes: int = 0
    """Of the allocated blocks, the bytes that hold tokens; the rest of them is waste."""
    num_running: int
    num_waiting: int
    expected_output_tokens: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    prefill_backlog_tokens: int
    num_preemptions: int
    """Since the worker started."""
    num_swaps: int = 0
    """Preemptions by swapping since the worker started."""
    prefix_lookup_tokens: int = 0
    """Prompt tokens looked up in the prefix cache since the worker started."""
    prefix_hit_tokens: int = 0
    """Of them, those whose KV was found."""
    prefix_merged_tokens: int = 0
    """Tokens whose KV was computed twice and is now stored once."""
    num_sessions: int = 0
    session_bytes: int = 0
    """KV that sessions keep between their requests."""
    pressure_level: int = 0
    """Degrade level that holds, counted from 1, the mildest; 0 is none."""
    num_oom_events: int
    """torch.OutOfMemoryError caught since the worker started."""
    releases: list[ReleaseState]
    ledger: list[ReservationState]
    rss_bytes: int
    """Resident bytes of the worker process (device bytes on CUDA)."""
    num_steps: int

    @property
    def headroom_bytes(self) -> int:
        """KV that a new request may take: free + reclaimable - committed."""
        available = self.kv_free_bytes + self.kv_reclaimable_bytes - self.kv_committed_bytes
        return max(0, available)


class Ready(Message, frozen=True, kw_only=True):
    """The worker serves."""

    profile: Profile
    max_model_len: int
    vocab_size: int
    dtype: str
    ranks: list[RankPlace] = []
    """The device map."""
    state: WorkerState


class StartFailed(Message, frozen=True, kw_only=True):
    """The worker cannot serve; restarting would not help. One line naming field or file."""

    error: str
    may_retry: bool = False
    """Nobody foresaw it, so restarting may help: it is a crash of which one line is known."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token and the likeliest alternatives, likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length"]
    """Empty: more to come."""
    logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had when the request first started."""


class StepDone(Message, frozen=True, kw_only=True):
    """Output of one step, sent as soon as it is known."""

    outputs: list[TokenOutput]


class Admitted(Message, frozen=True, kw_only=True):
    """The request is in the worker's hands: it computes it, or it waits for memory there."""

    request_id: str


class Rejected(Message, frozen=True, kw_only=True):
    """Admission refused a request; nothing of it is kept."""

    request_id: str
    needed_bytes: int
    available_bytes: int
    never: bool
    """True: larger than the whole pool or the model's length."""
    retry_after_s: float
    message: str


class RequestFailed(Message, frozen=True, kw_only=True):
    """Only this request failed after admission, for instance because a step for it alone ran out
    of memory."""

    request_id: str
    message: str
    field: str = ""
    """Of the request, when it is at fault; empty: the engine is."""


class State(Message, frozen=True, kw_only=True):
    state: WorkerState


ToWorker = Submit | Cancel | Fault | Shutdown
ToServer = Loading | Ready | StartFailed | StepDone | Admitted | Rejected | RequestFailed | State
