"""Messages between the server process and its worker, msgpack on a Unix stream (`frames.py`).

The worker connects and sends any number of `Loading`, then one `Ready` or one `StartFailed`. After
that, the server sends `Submit` and `Cancel`, and the worker sends `StepDone` after each step and
`StateReport` when its memory changes. The worker answers every request of a `Submit` with tokens
(the last of which has a finish reason), with one `Embedding`, with one `Rejected` or with one
`RequestFailed`.

The tiers of KV outside the device belong to the server (see `ullage_kv`). The worker offers its
complete blocks with `KvOffer`, receives slots with `KvGranted`, and reports the copies with
`KvWritten`. The worker requests blocks with `KvWanted`, receives slots to read with `KvFound`, and
returns the slots with `KvRead`.
"""

from typing import Literal

import msgspec

from ullage_common.request_cost import MemoryProfile
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint
from ullage_engine.protocol.requests import Embedding, EngineRequest, TokenOutput
from ullage_engine.protocol.worker_state import RankPlace, WorkerState

WINDOW_PART = "window"
"""Part name from which `ullage_kv.keys.part_key` derives the key of a block's window block."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base class of all messages."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that is complete on the device."""

    key: bytes
    parent: bytes | None
    """Key of the preceding block."""
    is_kept: bool = False
    """Whether the block belongs to a session, whose next turn will need the block."""


class KvSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the host tier that is reserved for one block."""

    key: bytes
    slot: int
    generation: int


# server → worker ---------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """Command: admit requests and serve them."""

    requests: list[EngineRequest]
    """Samples of one prompt, or the hypotheses of a beam search.

    Samples are admitted together, or refused together by one `Rejected` that names the first.
    Hypotheses are ordered from best to worst and returned when all are known.
    """
    resumed: bool = False
    """Whether an earlier worker had admitted the requests.

    Resumed requests wait for memory and are never rejected for lack of memory.
    """


class Cancel(Message, frozen=True, kw_only=True):
    """Command: drop a request."""

    request_id: str
    is_answered: bool = False
    """Whether the server cancels because of a stop string, not because of a disconnect."""


class Fault(Message, frozen=True, kw_only=True):
    """Command: inject an out-of-memory error into an upcoming step."""

    after_steps: int


class LimitBatch(Message, frozen=True, kw_only=True):
    """Command: start new sequences only while fewer than a share of the maximum batch size run.

    The maximum batch size is `batching.max_sequences`. Memory may limit the number further. The
    limit holds until the next `LimitBatch`.
    """

    share: float
    """Share from 0 to 1, where 1 means no limit."""


class StartProfile(Message, frozen=True, kw_only=True):
    """Command: profile the next steps and answer with `ProfileDone`.

    Only one profile runs at a time.
    """

    kind: Literal["operations", "timeline"]
    steps: int
    seconds: float
    """Maximum duration, after which the profile ends even if it has fewer steps or none."""
    path: str
    """File to write the trace to, compressed with gzip."""


class StopProfile(Message, frozen=True, kw_only=True):
    """Command: end the profile now."""


class KvGranted(Message, frozen=True, kw_only=True):
    """Slots for offered blocks.

    A block without a slot is already stored, or cannot be stored now.
    """

    slots: list[KvSlot]


class KvFound(Message, frozen=True, kw_only=True):
    """The answer to a `KvWanted`: slots to read, which do not change until `KvRead`."""

    number: int
    slots: list[int]
    """Slots of the blocks from the first requested block up to the first missing block."""
    window_slots: list[int] = []
    """Slots of the last window blocks before the first missing block, if any exist."""
    more_from: int | None = None
    """Index in the sequence of the first block that is still being loaded, or None.

    The worker requests these blocks with `is_rest`. None means that there are no more blocks.
    """


class AddAdapter(Message, frozen=True, kw_only=True):
    """Command: serve requests with one more LoRA adapter. The answer is `AdapterAdded`."""

    name: str
    """Name that requests give as `adapter`. A name always stands for the same files."""
    folder: str
    is_checked: bool = False
    """Whether an earlier worker has loaded the adapter.

    Such an adapter is not loaded at once, but when a request needs it.
    """


class RemoveAdapter(Message, frozen=True, kw_only=True):
    """Command: remove an adapter that is no longer used by any request."""

    name: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command: exit with status 0."""


# worker → server ---------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    """Progress report during the worker's start."""

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
    """The device map: the layers and heads of each rank."""
    task: Literal["generate", "embed"] = "generate"
    """The model's task. The worker serves no requests of any other task."""
    fingerprint: Fingerprint = UNKNOWN
    """Fingerprint of everything that affects the exact bits of the worker's answers."""
    kv_space: bytes = b""
    """Namespace of the worker's KV blocks in tiers outside the device, or "" without such tiers."""
    computes_beside_loads: bool = True
    """Whether the worker computes the first blocks of a sequence while tiers load the last ones.

    If not, every `KvWanted` is answered when all of its blocks are loaded.
    """
    longest_step_s: float = 0.0
    """Longest step in seconds, as measured at the start, or 0 if not measured."""
    state: WorkerState


class StartFailed(Message, frozen=True, kw_only=True):
    """The worker cannot serve. Another start cannot succeed either, unless `may_retry` is set."""

    error: str
    """One line naming the field or file."""
    may_retry: bool = False
    """Whether another start may succeed, because the error was unforeseen."""
    is_unproven: bool = False
    """Whether the worker's results differ from those of the verified start."""


class AdapterAdded(Message, frozen=True, kw_only=True):
    """The answer to an `AddAdapter`."""

    name: str
    error: str = ""
    """One-line reason for the operator why the adapter cannot be used, or "" if it can be used."""


class StepDone(Message, frozen=True, kw_only=True):
    """Output of one step, sent as soon as the output is known."""

    outputs: list[TokenOutput]
    embeddings: list[Embedding] = []


class Admitted(Message, frozen=True, kw_only=True):
    """The worker has admitted a request, which is now computed or waits for memory."""

    request_id: str


class Rejected(Message, frozen=True, kw_only=True):
    """Admission control has refused a request. The worker keeps no state for this request."""

    request_id: str
    needed_bytes: int
    available_bytes: int
    never: bool
    """Whether the request is larger than the whole KV pool or the model's maximum length."""
    retry_after_s: float
    message: str


class RequestFailed(Message, frozen=True, kw_only=True):
    """The failure of one request after admission.

    For instance, a step for this request alone ran out of memory.
    """

    request_id: str
    message: str
    field: str = ""
    """Request field that is at fault, or "" if the engine is at fault."""


class ProfileDone(Message, frozen=True, kw_only=True):
    """A profile has ended, and its file is complete unless there was an error."""

    num_steps: int
    error: str = ""


class StateReport(Message, frozen=True, kw_only=True):
    """Report of the worker's memory and load, sent when they have changed."""

    state: WorkerState


class KvOffer(Message, frozen=True, kw_only=True):
    """Offer of blocks to copy to the host tier. The answer is `KvGranted`."""

    blocks: list[KvBlock]


class KvWritten(Message, frozen=True, kw_only=True):
    """Granted slots that the worker has finished writing or has given up."""

    stored: list[KvSlot]
    """Slots that now store their blocks."""
    dropped: list[KvSlot] = []
    """Slots of blocks that were evicted before the copy."""


class KvWanted(Message, frozen=True, kw_only=True):
    """Query for stored blocks with which a sequence can begin. The answer is `KvFound`."""

    number: int
    """Number of the query, unique in this worker."""
    request_id: str
    first: int
    """Index in the sequence of the first requested block."""
    keys: list[bytes]
    """Keys of the sequence's blocks, from its beginning."""
    is_rest: bool = False
    """Whether the answer waits until the blocks are loaded.

    If not, the answer comes at once with the blocks that are available.
    """


class KvRead(Message, frozen=True, kw_only=True):
    """The worker has read the slots of a `KvFound`, or does not need them."""

    number: int
    num_blocks: int
    """Number of stored blocks with which the sequence began."""


class KvDamaged(Message, frozen=True, kw_only=True):
    """Blocks whose bytes may be corrupt and must not be read again."""

    chains: list[bytes] | None
    """Key prefixes of the blocks, each of `ullage_kv.keys.CHAIN_BYTES` bytes. None means all."""


FromKv = KvOffer | KvWritten | KvWanted | KvRead | KvDamaged
"""Messages from the worker about KV outside the device."""

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
