"""The protocols of vLLM against which this room is written.

`VllmCore` in `bindings` implements them.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from ullage_engine.protocol.requests import EngineRequest, TokenLogprobs


class InvalidRequestError(Exception):
    """vLLM refuses a request's parameters; the message is one line for the client."""

    def __init__(self, message: str, field: str) -> None:
        """`field`: field of the request that is at fault."""
        super().__init__(message)
        self.field = field


class AdapterError(Exception):
    """An adapter cannot be loaded; the message is one line for the client."""

    field = "model"
    """Field of the request that names the adapter. The engine is not at fault."""

    def __init__(self, name: str, reason: str) -> None:
        """`reason`: one line for the engine's operator, which may name its files."""
        super().__init__(
            f"adapter {name} cannot be loaded; ask for another model, and have whoever runs the "
            "service read the engine's log"
        )
        self.reason = reason


class CoreOutput(msgspec.Struct, frozen=True):
    """The output of one request in one step."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length", "error"] = ""
    """Reason why the request ended; empty: more to come."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Tokens whose KV the prefix cache had when the request was started."""
    num_loaded_tokens: int = 0
    """Tokens behind those whose KV came from tiers outside the device."""
    error: str = ""
    """Why vLLM or its grammar gave the request up; one line for the client."""
    field: str = ""
    """Field of the request that is at fault; empty: the engine is."""
    embedding: bytes = b""
    """The prompt's embedding, which ends the request: float32, little-endian."""

    @property
    def num_reused_tokens(self) -> int:
        """Tokens that were not computed for the request."""
        return self.num_cached_tokens + self.num_loaded_tokens


class Prefix(Protocol):
    """Cached blocks of a prompt that are held, so that they are not evicted."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held(self) -> float:
        """Blocks that a request with this prefix would hold; see `Blocks.num_held`."""


class Blocks(Protocol):
    """The KV blocks of vLLM's pool."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests may have."""

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, including those of the prefix cache."""

    def num_held(self, request_id: str) -> float:
        """Count the blocks that a request holds and need not allocate; 0 before it starts.

        A shared block counts for each of its holders, since each holds it to its end. A shared
        block of a sliding window counts in equal parts: a holder that slides past it needs another
        block while the shared one is not free yet.
        """

    def num_in_tables(self, request_id: str) -> int:
        """Count the blocks that a request uses, shared ones like others."""

    def num_computed(self, request_id: str) -> int:
        """Count the tokens whose KV is stored or being computed."""

    def hold_prefix(self, request_id: str) -> Prefix:
        """Hold the cached blocks of a request's tokens, which may have ended in the last step."""

    def num_reclaimable(self, prefixes: Iterable[Prefix]) -> float:
        """Count the blocks that become free once all these prefixes are released.

        A window block that requests hold, too, counts by the prefixes' share.
        """

    def release(self, prefix: Prefix) -> None:
        """Release the blocks of a prefix; they stay cached until they are needed."""


class Core(Protocol):
    """vLLM's engine in this process."""

    @property
    def blocks(self) -> Blocks: ...

    def is_compiled(self, grammar: str) -> bool:
        """Return whether a grammar is compiled. If not, its compilation begins."""

    def add_adapter(self, name: str, folder: str) -> None:
        """Record the folder of a LoRA adapter, under a name that no other adapter has had."""

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter that is in no slot."""

    def check_adapter(self, name: str) -> None:
        """Read an adapter as `load_adapter` does, and discard it.

        Raises:
            AdapterError: it cannot be read, or does not fit the model.
        """

    def load_adapter(self, name: str) -> None:
        """Read a LoRA adapter into a free slot.

        Raises:
            AdapterError: it cannot be read, or does not fit the model. Nothing of it is kept.
        """

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter that no request uses."""

    def add(self, request: EngineRequest, max_tokens: int) -> None:
        """Give a request to vLLM, which produces at most `max_tokens` more.

        The request's grammar must be compiled and its adapter loaded.

        Raises:
            InvalidRequestError: its parameters cannot be served. Nothing of it is kept.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request. An ended request is no error.

        Its blocks are free at once, or within the next steps if several steps are in flight.
        """

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""

    def set_max_running(self, num_requests: int) -> None:
        """Limit the requests of a batch. Running requests go on."""

    def step(self) -> list[CoreOutput]:
        """Compute one step.

        Raises:
            GroupLostError: the process of a rank has ended.
            Exception: the engine is broken and needs a new process.
        """
