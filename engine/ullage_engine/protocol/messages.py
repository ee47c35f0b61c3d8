"""Messages between the server process and its worker, msgpack on a Unix stream (`frames.py`).

The worker connects and sends any number of `Loading`, then one `Ready` or one `StartFailed`. From
then on the server sends `Submit` and `Cancel`, and the worker sends `StepDone` after each step and
`StateReport` when its memory changes. Every request of a `Submit` is answered by tokens ending with
a finish, by one `Embedding`, by one `Rejected` or by one `RequestFailed`.

The tiers of KV outside the device belong to the server (see `ullage_kv`). The worker offers its
complete blocks by `KvOffer`, gets slots by `KvGranted`, and reports the copies by `KvWritten`. It
asks for blocks by `KvWanted`, gets slots to read by `KvFound`, and returns them by `KvRead`.
"""

from typing import Literal

import msgspec

from ullage_common.request_cost import MemoryProfile
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint
from ullage_engine.protocol.requests import Embedding, EngineRequest, TokenOutput
from ullage_engine.protocol.worker_state import RankPlace, WorkerState

WINDOW_PART = "window"
"""Part of a block's key that stands for its window block."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base class of all messages."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that is complete on the device."""

    key: bytes
    parent: bytes | None
    """Key of the block before it."""
    is_kept: bool = False
    """Whether it belongs to a session, whose next turn will want it."""


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
    Hypotheses are ordered from best to worst and answered when all are known.
    """
    resumed: bool = False
    """Whether a former worker had admitted them.

    They wait for memory and are never rejected for lack of it.
    """


class Cancel(Message, frozen=True, kw_only=True):
    """Command: drop a request."""

    request_id: str
    is_answered: bool = False
    """Whether a stop string ended it, which only the server sees. Otherwise its client has gone."""


class Fault(Message, frozen=True, kw_only=True):
    """Command: run out of memory inside a coming step."""

    after_steps: int


class LimitBatch(Message, frozen=True, kw_only=True):
    """Command: start new sequences only while fewer than a share of the largest batch run.

    The largest batch is `batching.max_sequences`. Memory may limit the number further. The limit
    holds until the next `LimitBatch`.
    """

    share: float
    """From 0 to 1, which is no limit."""


class StartProfile(Message, frozen=True, kw_only=True):
    """Command: profile the coming steps and answer with `ProfileDone`.

    There is only one profile at a time.
    """

    kind: Literal["operations", "timeline"]
    steps: int
    seconds: float
    """Longest time after which it ends, with fewer steps or none."""
    path: str
    """File that gets the trace, compressed with gzip."""


class StopProfile(Message, frozen=True, kw_only=True):
    """Command: end the profile now."""


class KvGranted(Message, frozen=True, kw_only=True):
    """Slots for offered blocks. Blocks without a slot are stored already, or not wanted."""

    slots: list[KvSlot]


class KvFound(Message, frozen=True, kw_only=True):
    """The answer to a `KvWanted`: slots to read, which do not change until `KvRead`."""

    number: int
    slots: list[int]
    """Slots of the blocks from the first wanted one on, up to the first that is missing."""
    window_slots: list[int] = []
    """Slots of the last window blocks up to there, where layers with windows have their own."""
    more_from: int | None = None
    """Index in the sequence of the first of more blocks, which are being loaded.

    The worker asks for them with `is_rest`. None if there are no more.
    """


class AddAdapter(Message, frozen=True, kw_only=True):
    """Command: serve requests with one more LoRA adapter. The answer is `AdapterAdded`."""

    name: str
    """Name that requests have as `adapter`. A name always stands for the same files."""
    folder: str
    is_checked: bool = False
    """Whether a former worker has loaded it. Then it is loaded when a request asks for it."""


class RemoveAdapter(Message, frozen=True, kw_only=True):
    """Command: remove an adapter that no request uses any more."""

    name: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command: exit with status 0."""


# worker → server ---------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    """Progress of the start."""

    stage: str
    """imports, followers, weights, arena, warm_up, kv_pool or adapters."""
    done_bytes: int
    total_bytes: int
    rank: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """The worker serves."""

    profile: MemoryProfile
    max_model_len: int
    vocab_size: int
    dtype: str
    ranks: list[RankPlace] = []
    """The device map."""
    task: Literal["generate", "embed"] = "generate"
    """The model's task. The worker serves no requests of the other one."""
    fingerprint: Fingerprint = UNKNOWN
    """Everything that decides the bits of its answers."""
    kv_space: bytes = b""
    """Namespace of its KV blocks in tiers outside the device, empty if it uses none."""
    computes_beside_loads: bool = True
    """Whether it computes the first blocks of a sequence while tiers load the last ones.

    If not, every `KvWanted` is answered when all of its blocks are loaded.
    """
    longest_step_s: float = 0.0
    """Seconds that a step takes at most, as measured at the start, 0 if not measured."""
    state: WorkerState


class StartFailed(Message, frozen=True, kw_only=True):
    """The worker cannot serve, nor can another one unless `may_retry`."""

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
    """Why its requests cannot be computed, as a line for the operator, empty if they can."""


class StepDone(Message, frozen=True, kw_only=True):
    """Output of one step, sent as soon as it is known."""

    outputs: list[TokenOutput]
    embeddings: list[Embedding] = []


class Admitted(Message, frozen=True, kw_only=True):
    """The worker has admitted a request, and computes it or lets it wait for memory."""

    request_id: str


class Rejected(Message, frozen=True, kw_only=True):
    """Admission has refused a request, of which the worker keeps nothing."""

    request_id: str
    needed_bytes: int
    available_bytes: int
    never: bool
    """Whether the request is larger than the whole pool or the model's length."""
    retry_after_s: float
    message: str


class RequestFailed(Message, frozen=True, kw_only=True):
    """The failure of one request after admission.

    For instance, a step for this request alone ran out of memory.
    """

    request_id: str
    message: str
    field: str = ""
    """Field of the request that is at fault, empty if the engine is."""


class ProfileDone(Message, frozen=True, kw_only=True):
    """A profile has ended, and its file is complete unless there was an error."""

    num_steps: int
    error: str = ""


class StateReport(Message, frozen=True, kw_only=True):
    """The worker's memory and load have changed."""

    state: WorkerState


class KvOffer(Message, frozen=True, kw_only=True):
    """Blocks to copy to the host tier. The answer is `KvGranted`."""

    blocks: list[KvBlock]


class KvWritten(Message, frozen=True, kw_only=True):
    """Granted slots that the worker has finished with."""

    stored: list[KvSlot]
    """Slots that now store their blocks."""
    dropped: list[KvSlot] = []
    """Slots of blocks that were evicted before the copy."""


class KvWanted(Message, frozen=True, kw_only=True):
    """Blocks that a sequence can begin with. The answer is `KvFound`."""

    number: int
    """Number of the query, unique in this worker."""
    request_id: str
    first: int
    """Index in the sequence of the first block that is wanted."""
    keys: list[bytes]
    """Keys of the sequence's blocks from the beginning on."""
    is_rest: bool = False
    """Whether the answer waits until the blocks are loaded.

    Otherwise it comes at once with those that are there.
    """


class KvRead(Message, frozen=True, kw_only=True):
    """The slots of a `KvFound` are read, or not needed."""

    number: int
    num_blocks: int
    """Blocks that the sequence began with."""


class KvDamaged(Message, frozen=True, kw_only=True):
    """Blocks whose bytes may be wrong, so that none of them is read again."""

    chains: list[bytes] | None
    """Beginnings of their keys, `ullage_kv.keys.CHAIN_BYTES` each. None stands for all blocks."""


FromKv = KvOffer | KvWritten | KvWanted | KvRead | KvDamaged
"""Messages of the worker on KV outside the device."""

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
