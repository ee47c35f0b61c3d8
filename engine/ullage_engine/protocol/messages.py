"""Messages between the server process and its worker, and the requests that they carry.

Messages are msgpack on a Unix stream (`frames.py`). The worker connects and sends `Loading` (any
number), then `Ready` once or `StartFailed` once; from then on the server sends `Submit` and
`Cancel`, the worker `StepDone` after each step and `StateReport` when its memory changes. Every
request of a `Submit` is answered by tokens ending with a finish, by one `Embedding`, by one
`Rejected` or by one `RequestFailed`.

`EngineRequest` is a request as every room of the engine sees it.
"""

from typing import Literal

import msgspec

from ullage_common.request_cost import MemoryProfile, charged_output
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint
from ullage_engine.protocol.figures import Figures


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of sampling, already validated by the server."""

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that are kept; 0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Always set: noise is a function of (seed, position), so a resumed request repeats itself."""
    logit_bias: dict[int, float] = {}
    """Biases added to the logits of these tokens, after penalties."""
    top_logprobs: int | None = None
    """Alternatives reported for each token; None reports no log-probabilities at all."""

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits of the next."""
        additive = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return additive or self.repetition_penalty != 1.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search over one prompt."""

    width: int
    """Hypotheses kept."""
    length_penalty: float = 1.0
    """Exponent of the length that divides a hypothesis' log-probability."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the worker gets it, for the first time or again after a restart."""

    request_id: str
    client_id: str = ""
    """What the request's client calls it, for logs; the same for all of its samples."""
    traceparent: str = ""
    """Parent of the spans of what a worker does for it; empty: it is not traced."""
    token_ids: list[int]
    """Prompt, followed by the output already sent when the request is resumed."""
    num_prompt_tokens: int
    """Number of `token_ids` that are prompt; penalties and positions count from here."""
    max_tokens: int
    """Output limit, counting output that is already part of `token_ids`."""
    sampling: SamplingParams
    stop_token_ids: list[int] = []
    """Ends generation when produced, unless it would be an end-of-sequence token being ignored."""
    priority: int = 0
    session_id: str = ""
    """Turns of one conversation, whose KV is kept between them; empty: none."""
    cache_salt: str = ""
    """Requests share cached KV only with requests of the same salt."""
    min_tokens: int = 0
    """Tokens of output before which no stop token is chosen."""
    grammar: str = ""
    """Grammar that the output must match, in llguidance's form; empty: any text."""
    beam: BeamParams | None = None
    """Parameters of a beam search that replaces sampling."""
    adapter: str = ""
    """Name of the LoRA adapter that it is computed with; empty: none."""
    embed: bool = False
    """Whether the embedding of the prompt is wanted, and no output: `max_tokens` is 0."""
    accepted_at: float = 0.0
    """When the server accepted it, by `time.monotonic`; 0 where it has output already."""
    num_stored_blocks: int = 0
    """Leading blocks of `token_ids` whose KV tiers outside the device have, or are likely to."""

    @property
    def session_key(self) -> str:
        """The session's name among those of all salts; empty: no session."""
        return f"{self.cache_salt}\0{self.session_id}" if self.session_id else ""

    def is_complete(self, longest: int, resumed: bool) -> bool:
        """Whether nothing is left to produce, of a request that was admitted before.

        Args:
            longest: tokens that a sequence of it may have.
            resumed: whether a former worker had admitted it.
        """
        num_produced = len(self.token_ids) - self.num_prompt_tokens
        if self.embed or not (resumed or num_produced > 0):
            return False
        return num_produced >= self.max_tokens or len(self.token_ids) >= longest

    def charged_tokens(self, expected_output: int, limit: int) -> int:
        """Return the tokens it is charged for: its prompt and the output it is expected to have.

        Output that it has already counts, and one token more that it is going to produce. Never
        above `limit`, the longest sequence that this engine can hold.
        """
        produced = len(self.token_ids) - self.num_prompt_tokens
        output = charged_output(self.max_tokens, expected_output, produced)
        return min(limit, self.num_prompt_tokens + output)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the device map."""

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


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base class of all messages."""


# server → worker ---------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    requests: list[EngineRequest]
    """Samples of one prompt, admitted together or refused together by one `Rejected` that names the
    first; of a beam search, its hypotheses from best to worst, answered when all are known."""
    resumed: bool = False
    """Whether a former worker had admitted it: it waits for memory and is never rejected for lack
    of it."""


class Cancel(Message, frozen=True, kw_only=True):
    request_id: str
    is_answered: bool = False
    """Whether a stop string ended it, which only the server sees; else its client has gone."""


class Fault(Message, frozen=True, kw_only=True):
    """Command: run out of memory inside a coming step."""

    after_steps: int


class LimitBatch(Message, frozen=True, kw_only=True):
    """Command: start no more sequences than a share of `batching.max_sequences`, beside what memory
    says; it holds until the next one."""

    share: float
    """From 0 to 1, which is no bound."""


class StartProfile(Message, frozen=True, kw_only=True):
    """Command: look at the coming steps, and answer with `ProfileDone`; there is no other look."""

    kind: Literal["operations", "timeline"]
    steps: int
    seconds: float
    """Longest time after which it ends, with fewer steps or none."""
    path: str
    """File that gets the trace, compressed with gzip."""


class StopProfile(Message, frozen=True, kw_only=True):
    """Command: end the look at steps now."""


class KvGranted(Message, frozen=True, kw_only=True):
    """Slots for blocks that were offered; those without one are stored already, or not wanted."""

    slots: list["KvSlot"]


class KvFound(Message, frozen=True, kw_only=True):
    """The answer to a `KvWanted`: slots to read, which stay as they are until `KvRead`."""

    number: int
    slots: list[int]
    """Slots of the blocks from the first one wanted on, as far as they are there."""
    window_slots: list[int] = []
    """Slots of the last window blocks up to there, where layers with windows have their own."""
    more_from: int | None = None
    """Index in the sequence of the first of more blocks, which are being loaded: they are asked for
    with `is_rest`. None: there are no more."""


class AddAdapter(Message, frozen=True, kw_only=True):
    """Command to serve requests with one more LoRA adapter; the answer is `AdapterAdded`."""

    name: str
    """Name that requests have as `adapter`; no other files ever have the same."""
    folder: str
    is_checked: bool = False
    """Whether a former worker has loaded it: then it is loaded when a request asks for it."""


class RemoveAdapter(Message, frozen=True, kw_only=True):
    """Command to remove an adapter that no request uses any more."""

    name: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command: exit with status 0."""


# worker → server ---------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    """Progress of the start: stage is imports, followers, weights, arena, warm_up, kv_pool or
    adapters."""

    stage: str
    done_bytes: int
    total_bytes: int
    rank: int = 0


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger, bytes."""

    name: str
    reserved_bytes: int
    allocated_bytes: int
    on_host: bool = False
    """Whether it is pinned memory of the host, beside the device's budget."""


class ReleaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a running request is predicted to give back."""

    after_s: float
    num_bytes: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler holds and has done at one moment."""

    kv_pool_bytes: int
    kv_free_bytes: int
    """KV bytes of free blocks."""
    kv_reclaimable_bytes: int
    """KV bytes kept for reuse and evicted as soon as they are needed."""
    kv_committed_bytes: int
    """KV bytes that are reserved and not yet allocated, or withheld from new requests."""
    kv_used_bytes: int = 0
    """Bytes of the allocated blocks that hold tokens; the rest of the blocks is waste."""
    num_running: int
    num_waiting: int
    num_steps: int
    """Steps with work that were committed since the worker started."""
    expected_output_tokens: int
    """Output length that blocks are reserved for when a request is admitted."""
    prefill_backlog_tokens: int
    """Prompt tokens admitted and not computed."""
    num_preemptions: int
    """Preemptions since the worker started."""
    num_swaps: int = 0
    """Preemptions by swapping since the worker started."""
    swap_out_bytes: int = 0
    """KV copied to host memory since the worker started."""
    swap_in_bytes: int = 0
    """KV copied back since the worker started."""
    prefix_lookup_tokens: int = 0
    """Tokens looked up in the prefix cache when requests first started."""
    prefix_hit_tokens: int = 0
    """Looked-up tokens whose KV was cached."""
    prefix_merged_tokens: int = 0
    """Tokens whose KV was computed twice and is now stored once."""
    num_draft_tokens: int = 0
    """Draft tokens of speculation checked since the worker started."""
    num_accepted_tokens: int = 0
    """Those of them that answers got."""
    num_sessions: int = 0
    session_bytes: int = 0
    """KV bytes that sessions keep between their requests."""
    num_adapter_loads: int = 0
    """LoRA adapters loaded since the worker started."""
    num_adapter_unloads: int = 0
    """Those of them that gave their slot to another one."""
    figures: Figures = msgspec.field(default_factory=Figures)
    """Times and sizes of steps, and how long requests waited, since the worker started."""

    @property
    def headroom_bytes(self) -> int:
        """KV that a new request may take: free + reclaimable - committed."""
        available = self.kv_free_bytes + self.kv_reclaimable_bytes - self.kv_committed_bytes
        return max(0, available)

    @property
    def kv_held_bytes(self) -> int:
        """KV in block tables: neither free nor kept by caches alone."""
        return max(0, self.kv_pool_bytes - self.kv_free_bytes - self.kv_reclaimable_bytes)

    @property
    def kv_waste_ratio(self) -> float:
        """Share of the KV in block tables that holds no tokens, 0 to 1."""
        held = self.kv_held_bytes
        return max(0.0, 1.0 - self.kv_used_bytes / held) if held else 0.0


class WorkerState(SchedulerStats, frozen=True, kw_only=True):
    """The worker's memory and load at one moment; see ullage.headroom.v1.Headroom."""

    total_bytes: int
    threshold: float
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    step_seconds: list[float] = []
    """Seconds of a step that decodes 1 sequence, 2 to 3, 4 to 7 and so on; empty until measured."""
    pressure_level: int = 0
    """Degrade level that holds, counted from 1, the mildest; 0 is none."""
    batch_share: float = 1.0
    """Share of `batching.max_sequences` that may run at once, 0 to 1."""
    batch_limit: float = 1.0
    """The bound of it that the server gave last; 1 is none."""
    num_oom_events: int
    """Steps that ran out of memory since the worker started."""
    num_nonfinite_logits: int = 0
    """Requests that failed since the worker started because their logits were NaN or infinite."""
    num_overlapped_steps: int = 0
    """Steps begun since the worker started while later pipeline stages computed an earlier one."""
    releases: list[ReleaseState]
    ledger: list[ReservationState]
    rss_bytes: int
    """Resident bytes of the worker's ranks; on CUDA rank 0's own bytes of its device."""
    swap_seconds: float = 0.0
    """Seconds of copying to host memory and back since the worker started, on rank 0."""
    swap_bytes_per_second: float = 0.0
    """Bandwidth to host memory measured at start, over all ranks; 0 without host memory for KV."""
    kv_withheld_bytes: int = 0
    """KV that new requests may not take, because other processes took memory of the device."""


class Ready(Message, frozen=True, kw_only=True):
    """The worker serves."""

    profile: MemoryProfile
    max_model_len: int
    vocab_size: int
    dtype: str
    ranks: list[RankPlace] = []
    """The device map."""
    task: Literal["generate", "embed"] = "generate"
    """What the model is for; no other requests come."""
    fingerprint: Fingerprint = UNKNOWN
    """What decides the bits of its answers."""
    kv_space: bytes = b""
    """Namespace of its KV blocks in tiers outside the device; empty: it uses none."""
    computes_beside_loads: bool = True
    """Whether it computes the first blocks of a sequence while the last ones are loaded from tiers;
    else every `KvWanted` has its answer when all that it begins with is loaded."""
    longest_step_s: float = 0.0
    """Seconds that a step takes at most, as measured at the start; 0: not measured."""
    state: WorkerState


class StartFailed(Message, frozen=True, kw_only=True):
    """The worker cannot serve; restarting would not help. One line naming field or file."""

    error: str
    may_retry: bool = False
    """Whether restarting may help, since nobody foresaw the error."""
    is_unproven: bool = False
    """Whether it computes otherwise than a start that was verified."""


class AdapterAdded(Message, frozen=True, kw_only=True):
    """The answer to an `AddAdapter`."""

    name: str
    error: str = ""
    """Why its requests cannot be computed, as a line for whoever runs the engine; empty: they
    can."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token and the likeliest alternatives, likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length"]
    """Reason why the request ended; empty: more to come."""
    logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had when the request first started."""


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """The embedding of one request, which ends it."""

    request_id: str
    vector: bytes
    """float32 numbers, little-endian."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had."""


class StepDone(Message, frozen=True, kw_only=True):
    """Output of one step, sent as soon as it is known."""

    outputs: list[TokenOutput]
    embeddings: list[Embedding] = []


class Admitted(Message, frozen=True, kw_only=True):
    """The request is in the worker's hands: it computes it, or it waits for memory there."""

    request_id: str


class Rejected(Message, frozen=True, kw_only=True):
    """Admission refused a request; nothing of it is kept."""

    request_id: str
    needed_bytes: int
    available_bytes: int
    never: bool
    """Whether the request is larger than the whole pool or the model's length."""
    retry_after_s: float
    message: str


class RequestFailed(Message, frozen=True, kw_only=True):
    """The failure of one request after admission, for instance because a step for it alone ran out
    of memory."""

    request_id: str
    message: str
    field: str = ""
    """Field of the request that is at fault; empty: the engine is."""


class ProfileDone(Message, frozen=True, kw_only=True):
    """A look at steps has ended, and its file is there unless there was an error."""

    num_steps: int
    error: str = ""


class StateReport(Message, frozen=True, kw_only=True):
    state: WorkerState


# KV in tiers outside the device; see `ullage_kv` --------------------------------------------------


WINDOW_PART = "window"
"""Part of a block's key that stands for its window block."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that is complete on the device."""

    key: bytes
    parent: bytes | None
    """Key of the block before it."""
    is_kept: bool = False
    """Whether it is of a session, whose next turn will want it."""


class KvSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the host tier that is reserved for one block."""

    key: bytes
    slot: int
    generation: int


class KvOffer(Message, frozen=True, kw_only=True):
    """Blocks to copy to the host tier; answered by `KvGranted`."""

    blocks: list[KvBlock]


class KvWritten(Message, frozen=True, kw_only=True):
    """What became of granted slots."""

    stored: list[KvSlot]
    """Slots that their blocks were copied to."""
    dropped: list[KvSlot] = []
    """Slots of blocks that were evicted meanwhile."""


class KvWanted(Message, frozen=True, kw_only=True):
    """Blocks that a sequence can begin with; answered by `KvFound`."""

    number: int
    """Number of the query, unique in this worker."""
    request_id: str
    first: int
    """Index in the sequence of the first block that is wanted."""
    keys: list[bytes]
    """Keys of the sequence's blocks from the beginning on."""
    is_rest: bool = False
    """Whether the answer waits until they have been loaded; else it says at once what is there."""


class KvRead(Message, frozen=True, kw_only=True):
    """The slots of a `KvFound` are read, or not needed."""

    number: int
    num_blocks: int
    """Blocks that the sequence began with."""


class KvDamaged(Message, frozen=True, kw_only=True):
    """Blocks whose bytes may be wrong; none of them is read again."""

    chains: list[bytes] | None
    """Beginnings of their keys, `ullage_kv.keys.CHAIN_BYTES` each; None: all blocks."""


ToWorker = (
    Submit
    | Cancel
    | Fault
    | LimitBatch
    | StartProfile
    | StopProfile
    | KvGranted
    | KvFound
    | AddAdapter
    | RemoveAdapter
    | Shutdown
)
FromKv = KvOffer | KvWritten | KvWanted | KvRead | KvDamaged
"""What the scheduler says of KV outside the device."""
ToServer = (
    Loading
    | Ready
    | StartFailed
    | StepDone
    | Admitted
    | Rejected
    | RequestFailed
    | StateReport
    | ProfileDone
    | AdapterAdded
    | FromKv
)
