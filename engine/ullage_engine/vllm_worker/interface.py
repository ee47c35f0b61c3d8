"""Interfaces through which the rest of this package uses vLLM.

`bindings.VllmCore` implements these interfaces.
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
        """Create an error with a one-line reason for the engine's log, which may name files."""
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
    """Why the request ended, or an empty string if more output follows."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Number of tokens whose KV was in the prefix cache when the request started."""
    num_loaded_tokens: int = 0
    """Number of further tokens whose KV was loaded from tiers outside the device."""
    error: str = ""
    """One-line message for the client about a failure of the request in vLLM or in its grammar."""
    field: str = ""
    """Request field that caused the failure, or an empty string if the engine caused it."""
    embedding: bytes = b""
    """Embedding of the prompt, as little-endian float32 bytes. The embedding ends the request."""

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
        """Number of blocks that a request with this prefix would hold. See `Blocks.num_held`."""


class Blocks(Protocol):
    """Interface to the KV blocks of vLLM's pool."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that requests may use."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds. Blocks in the prefix cache count as free."""

    def num_held(self, request_id: str) -> float:
        """Return the number of blocks that a request already holds, or 0 before the request starts.

        A shared block counts in full for each request that holds it, because each keeps the block
        until the request ends. A shared block of a sliding window is divided equally among the
        requests that hold it. When one request's window moves past the block, that request
        allocates another block while the other requests still use the shared block.
        """

    def num_in_tables(self, request_id: str) -> int:
        """Return the number of blocks in a request's block tables, shared blocks included."""

    def num_computed(self, request_id: str) -> int:
        """Return the number of tokens whose KV is stored or being computed."""

    def hold_prefix(self, request_id: str) -> Prefix:
        """Pin the cached blocks of a request, even if the request ended in the last step."""

    def num_reclaimable(self, prefixes: Iterable[Prefix]) -> float:
        """Return the number of blocks that become free when all these prefixes are released.

        If requests also hold a sliding-window block, only the prefixes' share of the block counts.
        """

    def release(self, prefix: Prefix) -> None:
        """Unpin the blocks of a prefix. The blocks stay cached until the pool needs them."""


class Core(Protocol):
    """Interface to vLLM's engine in this process."""

    @property
    def blocks(self) -> Blocks: ...

    def is_compiled(self, grammar: str) -> bool:
        """Return whether a grammar is compiled. If not, start compiling the grammar."""

    def add_adapter(self, name: str, folder: str) -> None:
        """Register the folder of a LoRA adapter under a name that has never been used before."""

    def remove_adapter(self, name: str) -> None:
        """Unregister an adapter that is in no slot."""

    def check_adapter(self, name: str) -> None:
        """Read an adapter like `load_adapter`, but do not keep the adapter loaded.

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
        """Abort a request. Ignore requests that have ended.

        The request's blocks become free at once, or within the next steps if several steps are in
        flight.
        """

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""

    def set_max_running(self, num_requests: int) -> None:
        """Limit the number of requests per batch. Requests that already run are not stopped."""

    def step(self) -> list[CoreOutput]:
        """Compute one step and return the outputs of its requests.

        Raises:
            GroupLostError: a rank's process has ended.
            Exception: the engine is broken and needs a new process.
        """
