"""Protocols that describe vLLM to the rest of this package.

`bindings.VllmCore` implements them.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from ullage_engine.protocol.requests import EngineRequest, TokenLogprobs


class InvalidRequestError(Exception):
    """vLLM rejects a request's parameters. The message is one line for the client."""

    def __init__(self, message: str, field: str) -> None:
        """Create an error about the request's field `field`."""
        super().__init__(message)
        self.field = field


class AdapterError(Exception):
    """An adapter cannot be loaded. The message is one line for the client."""

    field = "model"
    """Request field that names the adapter. The adapter is at fault, not the engine."""

    def __init__(self, name: str, reason: str) -> None:
        """Create an error with a one-line reason for the engine's operator. It may name files."""
        super().__init__(
            f"adapter {name} cannot be loaded; ask for another model, and have whoever runs the "
            "service read the engine's log"
        )
        self.reason = reason


class CoreOutput(msgspec.Struct, frozen=True):
    """Output of one request in one step."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length", "error"] = ""
    """Why the request ended; empty if more output follows."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Tokens whose KV was in the prefix cache when the request started."""
    num_loaded_tokens: int = 0
    """Further tokens whose KV was loaded from tiers outside the device."""
    error: str = ""
    """Why vLLM or the grammar failed the request, as one line for the client."""
    field: str = ""
    """Request field that is at fault; empty if the engine is at fault."""
    embedding: bytes = b""
    """Embedding of the prompt, which ends the request: float32, little-endian."""

    @property
    def num_reused_tokens(self) -> int:
        """Number of prompt tokens whose KV was not computed."""
        return self.num_cached_tokens + self.num_loaded_tokens


class Prefix(Protocol):
    """Cached blocks of a prompt, pinned against eviction."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held(self) -> float:
        """Blocks that a request with this prefix would hold; see `Blocks.num_held`."""


class Blocks(Protocol):
    """The KV blocks of vLLM's pool."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that requests may use."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds, including blocks of the prefix cache."""

    def num_held(self, request_id: str) -> float:
        """Return the number of blocks that a request already holds; 0 before it starts.

        A shared block counts in full for each of its holders, since each keeps it until the end. A
        shared block of a sliding window is divided equally among its holders. A holder whose window
        leaves the block allocates another one while the shared block is still in use.
        """

    def num_in_tables(self, request_id: str) -> int:
        """Return the number of blocks in a request's block tables, shared blocks included."""

    def num_computed(self, request_id: str) -> int:
        """Return the number of tokens whose KV is stored or being computed."""

    def hold_prefix(self, request_id: str) -> Prefix:
        """Pin the cached blocks of a request's tokens, even if it ended in the last step."""

    def num_reclaimable(self, prefixes: Iterable[Prefix]) -> float:
        """Return the number of blocks that become free when all these prefixes are released.

        A window block that requests hold too counts by the prefixes' share of its holders.
        """

    def release(self, prefix: Prefix) -> None:
        """Unpin the blocks of a prefix. They stay cached until the pool needs them."""


class Core(Protocol):
    """vLLM's engine in this process."""

    @property
    def blocks(self) -> Blocks: ...

    def is_compiled(self, grammar: str) -> bool:
        """Return whether a grammar is compiled; start compiling it if not."""

    def add_adapter(self, name: str, folder: str) -> None:
        """Register the folder of a LoRA adapter under a name that was never used before."""

    def remove_adapter(self, name: str) -> None:
        """Unregister an adapter that is in no slot."""

    def check_adapter(self, name: str) -> None:
        """Read an adapter like `load_adapter`, but do not keep it.

        Raises:
            AdapterError: the adapter cannot be read or does not fit the model.
        """

    def load_adapter(self, name: str) -> None:
        """Read a LoRA adapter into a free slot.

        Raises:
            AdapterError: the adapter cannot be read or does not fit the model. The slot stays free.
        """

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter that no request uses."""

    def add(self, request: EngineRequest, max_tokens: int) -> None:
        """Pass a request to vLLM, which produces at most `max_tokens` more tokens.

        The grammar of the request must be compiled, and its adapter must be loaded.

        Raises:
            InvalidRequestError: vLLM rejects the parameters and keeps nothing of the request.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request; ignore requests that have ended.

        Its blocks are free at once, or within the next steps if several steps are in flight.
        """

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""

    def set_max_running(self, num_requests: int) -> None:
        """Limit the requests of a batch. Requests that already run are not stopped."""

    def step(self) -> list[CoreOutput]:
        """Compute one step and return the outputs of its requests.

        Raises:
            GroupLostError: a rank's process has ended.
            Exception: the engine is broken and needs a new process.
        """
