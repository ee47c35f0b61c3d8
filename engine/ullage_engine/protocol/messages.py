"""Messages between the server process and its worker, sent as msgpack on a Unix socket.

The worker connects and sends any number of `Loading` messages, then one `Ready` or one
`StartFailed`. After that, the server sends `Submit` and `Cancel`. The worker sends `StepDone` after
each step and `StateReport` when its memory usage changes. The worker answers every request of a
`Submit` with tokens (the last of which has a finish reason), with one `Embedding`, with one
`Rejected` or with one `RequestFailed`. See `frames.py` for the framing.

The server owns the KV tiers outside the device (see `ullage_kv`). The worker offers its complete
blocks with `KvOffer`, receives slots with `KvGranted`, and reports the finished copies with
`KvWritten`. To load blocks, the worker asks for them with `KvWanted`, receives slots to read with
`KvFound`, and returns the slots with `KvRead`.
"""

from typing import Literal

import msgspec

from ullage_common.request_cost import MemoryProfile
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint
from ullage_engine.protocol.requests import (
    Embedding,
    EngineRequest,
    PromptLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.worker_state import RankPlace, WorkerState

WINDOW_PART = "window"
"""Name from which `ullage_kv.keys.part_key` derives the key of a block's sliding-window KV."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base class of all messages."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """A KV block whose tokens have all been computed on the device."""

    key: bytes
    parent: bytes | None
    """Key of the preceding block of the sequence."""
    is_kept: bool = False
    """Whether the block belongs to a session and will be needed in the session's next turn."""


class KvSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot in the host tier, reserved for the KV block with this key.

    The generation increases each time the slot is allocated, so stale references have no effect.
    """

    key: bytes
    slot: int
    generation: int


# server → worker ---------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """Command: admit requests and serve them."""

    requests: list[EngineRequest]
    """Samples of one prompt, or the hypotheses of a beam search.

    Samples are admitted or rejected together. A single `Rejected`, which names the first sample,
    rejects all of them. Hypotheses are ordered from best to worst and are returned together at
    the end of the search.
    """
    resumed: bool = False
    """Whether an earlier worker already admitted the requests.

    Resumed requests wait for memory and are never rejected for lack of memory.
    """


class Cancel(Message, frozen=True, kw_only=True):
    """Command: drop a request."""

    request_id: str
    is_answered: bool = False
    """Whether the request is cancelled because of a stop string, not because of a disconnect."""


class Fault(Message, frozen=True, kw_only=True):
    """Command for fault-injection tests: make an upcoming step run out of memory.

    It is only available if `server.allow_fault_injection` is set.
    """

    after_steps: int


class Hang(Message, frozen=True, kw_only=True):
    """Command for fault-injection tests: compute without end, and run no further step.

    It is only available if `server.allow_fault_injection` is set.
    """


class LimitBatch(Message, frozen=True, kw_only=True):
    """Command: limit the number of running sequences to a fraction of the maximum batch size.

    Running sequences continue, but no sequence starts while the batch is at the limit. The maximum
    batch size is `batching.max_sequences`, and memory may limit the batch further. The limit holds
    until the next `LimitBatch`.
    """

    share: float
    """Fraction of the maximum batch size, from 0 to 1. 1 means no limit."""


class StartProfile(Message, frozen=True, kw_only=True):
    """Command: profile the next steps and reply with `ProfileDone`.

    Only one profile can run at a time.
    """

    kind: Literal["operations", "timeline"]
    steps: int
    seconds: float
    """Maximum duration in seconds, after which the profile ends even if it recorded fewer steps."""
    path: str
    """Path of the gzip-compressed trace file to write."""


class StopProfile(Message, frozen=True, kw_only=True):
    """Command: end the profile now."""


class KvGranted(Message, frozen=True, kw_only=True):
    """Reply to a `KvOffer`: slots in the host tier, to which the worker may copy offered blocks.

    An offered block gets no slot if it is already stored or cannot be stored now.
    """

    slots: list[KvSlot]


class KvFound(Message, frozen=True, kw_only=True):
    """Reply to a `KvWanted`: slots to read, which do not change until the worker sends `KvRead`."""

    number: int
    slots: list[int]
    """Slots of the blocks from the first requested block up to the first missing block."""
    window_slots: list[int] = []
    """Slots with sliding-window KV for the last blocks before the first missing block, if any."""
    more_from: int | None = None
    """Index of the sequence's first block that is still being loaded, or None.

    The worker then requests the remaining blocks with `is_rest`. None means that no more blocks are
    coming.
    """


class AddAdapter(Message, frozen=True, kw_only=True):
    """Command: make a LoRA adapter available to requests. The reply is `AdapterAdded`."""

    name: str
    """Name that requests pass as `adapter`. A name always refers to the same files."""
    folder: str
    is_checked: bool = False
    """Whether an earlier worker has already loaded the adapter successfully.

    Such an adapter is loaded lazily, when a request first needs it.
    """


class RemoveAdapter(Message, frozen=True, kw_only=True):
    """Command: remove an adapter that is no longer in use."""

    name: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command: exit with status 0."""


# worker → server ---------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    """Progress report while the worker starts."""

    stage: str
    """Current stage: imports, followers, weights, arena, warm_up, kv_pool or adapters."""
    done_bytes: int
    total_bytes: int
    rank: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """The worker is ready to serve requests."""

    profile: MemoryProfile
    max_model_len: int
    vocab_size: int
    dtype: str
    ranks: list[RankPlace] = []
    """Device map: the layers and heads assigned to each rank."""
    task: Literal["generate", "embed"] = "generate"
    """The model's task. The worker accepts no requests for any other task."""
    fingerprint: Fingerprint = UNKNOWN
    """Fingerprint of everything on which the exact bits of the worker's answers depend."""
    kv_space: bytes = b""
    """Namespace of the worker's KV blocks in tiers outside the device, or "" without tiers."""
    computes_beside_loads: bool = True
    """Whether the worker computes a sequence's first blocks while tiers load its later blocks.

    If not, every `KvWanted` is answered only once all of its blocks are loaded.
    """
    longest_step_s: float = 0.0
    """Duration of the longest step measured at startup, in seconds, or 0 if not measured."""
    state: WorkerState


class StartFailed(Message, frozen=True, kw_only=True):
    """The worker cannot serve. Restarting does not help, unless `may_retry` is set."""

    error: str
    """One-line error that names the configuration field or file at fault."""
    may_retry: bool = False
    """Whether restarting may help, because the error was unexpected."""
    is_unproven: bool = False
    """Whether the worker's results differ from those of a previously verified startup."""


class AdapterAdded(Message, frozen=True, kw_only=True):
    """Reply to an `AddAdapter`."""

    name: str
    error: str = ""
    """One-line reason why the adapter cannot be used, for the operator, or "" on success."""


class StepDone(Message, frozen=True, kw_only=True):
    """Output of one step, sent as soon as it is available."""

    outputs: list[TokenOutput]
    embeddings: list[Embedding] = []
    prompts: list[PromptLogprobs] = []
    """Log-probabilities of prompt tokens. Those of a whole prompt precede its first token."""


class Admitted(Message, frozen=True, kw_only=True):
    """The worker has admitted a request, which is now running or waiting for memory."""

    request_id: str


class Rejected(Message, frozen=True, kw_only=True):
    """Admission control has rejected a request. The worker keeps no state for it."""

    request_id: str
    needed_bytes: int
    available_bytes: int
    never: bool
    """Whether the request can never fit: it exceeds the whole KV pool or the maximum length."""
    retry_after_s: float
    message: str


class RequestFailed(Message, frozen=True, kw_only=True):
    """One request failed after it was admitted.

    For example, a step with only this request ran out of memory.
    """

    request_id: str
    message: str
    field: str = ""
    """Name of the request field that caused the failure, or "" if the engine is at fault."""


class ProfileDone(Message, frozen=True, kw_only=True):
    """A profile has ended. Its trace file is complete unless there was an error."""

    num_steps: int
    error: str = ""


class StateReport(Message, frozen=True, kw_only=True):
    """Report of the worker's memory and load, sent whenever they change."""

    state: WorkerState


class KvOffer(Message, frozen=True, kw_only=True):
    """Offers blocks that can be copied to the host tier. The reply is `KvGranted`."""

    blocks: list[KvBlock]


class KvWritten(Message, frozen=True, kw_only=True):
    """Reports which granted slots were written and which are no longer needed."""

    stored: list[KvSlot]
    """Slots that now contain their blocks."""
    dropped: list[KvSlot] = []
    """Slots that were not written, because their blocks were evicted before the copy."""


class KvWanted(Message, frozen=True, kw_only=True):
    """Asks which blocks of a starting sequence are stored in any tier. The reply is `KvFound`."""

    number: int
    """Id of the query, unique within this worker."""
    request_id: str
    first: int
    """Index of the first requested block within the sequence."""
    keys: list[bytes]
    """Keys of the sequence's blocks, starting with its first block."""
    is_rest: bool = False
    """Whether to reply only once the requested blocks are loaded.

    If not, the reply is immediate and contains the blocks that are available.
    """


class KvRead(Message, frozen=True, kw_only=True):
    """The worker has finished reading the slots of a `KvFound`, or does not need them."""

    number: int
    num_blocks: int
    """Number of the sequence's leading blocks that came from tiers."""


class KvDamaged(Message, frozen=True, kw_only=True):
    """Blocks whose contents may be corrupt and must not be read again."""

    chains: list[bytes] | None
    """First `ullage_kv.keys.CHAIN_BYTES` bytes of each block's key. None means all blocks."""


FromKv = KvOffer | KvWritten | KvWanted | KvRead | KvDamaged
"""Messages from the worker about KV in tiers outside the device."""

ToWorker = (
    Submit
    | Cancel
    | Fault
    | Hang
    | LimitBatch
    | StartProfile
    | StopProfile
    | KvGranted
    | KvFound
    | AddAdapter
    | RemoveAdapter
    | Shutdown
)

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
