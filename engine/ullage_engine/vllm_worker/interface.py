"""Interfaces through which the other modules of this package use vLLM.

`bindings.VllmCore` implements these interfaces.
"""

from typing import Literal, Protocol

import msgspec

from ullage_engine.protocol.requests import EngineRequest, TokenLogprobs


class InvalidRequestError(Exception):
    """Raised if vLLM rejects a request's parameters. The message is one line for the client."""

    def __init__(self, message: str, field: str) -> None:
        """Create an error about the request field `field`."""
        super().__init__(message)
        self.field = field


class AdapterError(Exception):
    """Raised if a LoRA adapter cannot be loaded. The message is one line for the client."""

    field = "model"
    """Request field reported as the cause, since an empty field would blame the engine."""

    def __init__(self, name: str, reason: str) -> None:
        """Create an error. The one-line `reason` goes to the engine's log, so it may name files."""
        super().__init__(
            f"adapter {name} cannot be loaded; ask for another model, and have whoever runs the "
            "service read the engine's log"
        )
        self.reason = reason


class CoreOutput(msgspec.Struct, frozen=True):
    """What one request has produced in one engine step: tokens, an embedding or an error."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length", "error"] = ""
    """Why the request finished, or "" if more output follows."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Number of tokens found in the prefix cache when the request started."""
    num_loaded_tokens: int = 0
    """Number of additional tokens whose KV was loaded from tiers outside the device."""
    error: str = ""
    """One-line message for the client if the request failed in vLLM or in its grammar."""
    field: str = ""
    """Request field that caused the failure, or "" if the engine caused it."""
    embedding: bytes = b""
    """The prompt's embedding as little-endian float32 bytes, which completes the request."""

    @property
    def num_reused_tokens(self) -> int:
        """Number of prompt tokens whose KV did not have to be computed."""
        return self.num_cached_tokens + self.num_loaded_tokens


class Prefix(Protocol):
    """Cached blocks that hold the beginning of a prompt, pinned to prevent their eviction."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_held(self) -> float:
        """Number of blocks in this prefix, with shared blocks counted as in `Blocks.num_held`."""


class Blocks(Protocol):
    """Interface to the KV blocks in vLLM's pool."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks available to requests."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds. Blocks in the prefix cache count as free."""

    def num_held(self, request_id: str) -> float:
        """Return the number of blocks that a request already holds, or 0 if it has not started.

        A shared block usually counts in full for every request that holds it, because each request
        keeps the block until it finishes. The exception is a shared sliding-window block, which
        counts as an equal fraction for each of its holders. A request whose window moves past such
        a block allocates another one, while the others still use the shared block.
        """

    def num_in_tables(self, request_id: str) -> int:
        """Return the number of blocks in a request's block tables, including shared blocks."""

    def num_computed(self, request_id: str) -> int:
        """Return the number of a request's tokens whose KV is stored or being computed."""

    def hold_prefix(self, request_id: str) -> Prefix:
        """Pin and return a request's cached blocks, even if it finished in the last step."""

    @property
    def num_reclaimable(self) -> float:
        """Number of blocks that would become free if the prefixes of all sessions were released.

        A sliding-window block is divided equally among its holders. If requests hold the block
        too, the result includes only the fractions of the sessions.
        """

    def on_session(self, prefix: Prefix) -> None:
        """Count a pinned prefix as that of an idle session from now on."""

    def on_session_end(self, prefix: Prefix) -> None:
        """Count a prefix no longer as that of a session. `release` must follow."""

    def release(self, prefix: Prefix) -> None:
        """Unpin a prefix's blocks, which stay cached until the pool needs them."""


class Core(Protocol):
    """Interface to vLLM's engine in this process."""

    @property
    def blocks(self) -> Blocks: ...

    def is_compiled(self, grammar: str) -> bool:
        """Return whether a grammar is compiled. If not, start compiling it."""

    def add_adapter(self, name: str, folder: str) -> None:
        """Register a LoRA adapter's folder under a name that has never been used before."""

    def remove_adapter(self, name: str) -> None:
        """Unregister an adapter that occupies no slot."""

    def check_adapter(self, name: str) -> None:
        """Read an adapter like `load_adapter`, but do not keep it loaded.

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
        """Pass a request to vLLM, which generates at most `max_tokens` more tokens.

        The request's grammar must already be compiled, and its adapter loaded.

        Raises:
            InvalidRequestError: vLLM rejects the parameters, and keeps no state for the request.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request. Requests that have finished are ignored.

        The request's blocks are freed immediately, even if a step that uses them is in flight.
        """

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""

    def set_max_running(self, num_requests: int) -> None:
        """Limit the number of requests per batch. Running requests are not stopped."""

    def step(self) -> list[CoreOutput]:
        """Compute one step and return the outputs of its requests.

        Raises:
            GroupLostError: a rank's process has exited.
            Exception: the engine is broken and must be restarted in a new process.
        """
