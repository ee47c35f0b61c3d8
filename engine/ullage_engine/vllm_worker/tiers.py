"""Transfers KV between vLLM's blocks and tiers outside the device.

As soon as vLLM caches a block, this module offers it to the host tier, so that vLLM can later evict
the block at no cost. The server grants slots for offered blocks. At the end of a step, granted
blocks that are still cached are copied to their slots. When vLLM is about to start a request, this
module asks the tiers for further blocks of the request that are not on the device. vLLM skips the
request until the reply arrives, and starts it in the step that copies the blocks to the device.

The server owns the tiers. `scheduler/kv_exchange.py` handles the messages to and from the server,
and this module plans the copies. vLLM calls this module through `bindings.connector`, which makes
the copies.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage_engine.protocol.messages import (
    FromKv,
    KvBlock,
    KvFound,
    KvRead,
    KvSlot,
)
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.scheduler.kv_exchange import ANSWER_S, KvExchange, KvQuery
from ullage_kv.keys import extend_keys


class TiersRefusedError(Exception):
    """Raised if the model's KV blocks cannot be copied to tiers. The message says why."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies between KV blocks and host-tier slots that every rank makes in one step."""

    number: int
    """Id that the ranks report once the copies are done, or 0 if there are no copies."""
    loads: tuple[tuple[int, int], ...] = ()
    """Pairs (slot, block). Slots are copied to blocks before the step computes."""
    stores: tuple[tuple[int, int], ...] = ()
    """Pairs (block, slot). Blocks are copied to slots after the step has computed."""


class _Place(NamedTuple):
    """A block that was offered to the tiers, and what it contained at that time."""

    block: int
    content: object
    """vLLM's identifier of the block's content. If the content has changed, the offer is void."""


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    keys: list[bytes] = field(default_factory=list)
    num_offered: int = 0
    """Number of the request's leading blocks that have been considered for an offer."""
    num_loaded: int = 0
    query: KvQuery | None = None
    asked_at: float = 0.0
    """Time at which the tiers were last asked for the request's blocks."""
    may_ask: bool = True


class _Reported(NamedTuple):
    """Messages about a step's copies, to be sent once all ranks have made the copies."""

    stored: list[KvSlot]
    read: list[KvRead]


class ConnectorTransfers:
    """Offers vLLM's KV blocks to the tiers, asks the tiers for blocks, and plans the copies."""

    def __init__(
        self,
        space: bytes,
        block_tokens: int,
        content_of: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an instance that tracks no requests yet.

        Args:
            space: namespace of the blocks' keys.
            block_tokens: tokens per block.
            content_of: returns vLLM's identifier of a block's cached content, or None if the block
                is not cached.
            clock: returns the time in seconds.
        """
        self._space = space
        self._block_tokens = block_tokens
        self._content_of = content_of
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._exchange = KvExchange[_Place]()
        self._offered_content: dict[int, object] = {}
        """Content of each block when it was last offered or loaded."""
        self._loads: list[tuple[int, int]] = []
        self._read: list[KvRead] = []
        self._step_numbers = itertools.count(1)
        self._steps: dict[int, _Reported] = {}
        """Messages about steps whose copies are still pending, by step number."""

    @property
    def has_granted(self) -> bool:
        """Whether the server has granted slots to blocks that have not been copied to them yet."""
        return self._exchange.has_granted

    @property
    def has_moves(self) -> bool:
        """Whether block copies require a step, even if no request needs one.

        This is the case while granted blocks are waiting to be copied, or while the copies of an
        earlier step have not been reported to the server.
        """
        return self._exchange.has_granted or bool(self._steps)

    # requests ------------------------------------------------------------------------------------

    def add(self, name: str, request: EngineRequest) -> None:
        """Start tracking a request, which vLLM identifies by `name`."""
        self._requests[name] = _Request(request)

    def forget(self, name: str) -> None:
        """Drop a finished request and its query. Unknown requests are ignored."""
        state = self._requests.pop(name, None)
        if state is not None:
            self._drop_query(state)

    def num_loaded_tokens(self, name: str) -> int:
        """Return how many of a request's tokens were loaded from tiers when it started."""
        state = self._requests.get(name)
        return state.num_loaded * self._block_tokens if state else 0

    # messages ------------------------------------------------------------------------------------

    def take_messages(self) -> list[FromKv]:
        """Return the messages for the server that have been queued since the last call."""
        return self._exchange.take_messages()

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Handle the server's reply to the oldest unanswered offer."""
        self._exchange.on_granted(slots)

    def on_found(self, answer: KvFound) -> None:
        """Handle the reply to a query. If the query was dropped, release its slots."""
        self._exchange.on_found(answer)

    # what vLLM asks ------------------------------------------------------------------------------

    def num_matched(self, name: str, token_ids: Sequence[int], num_cached: int) -> int | None:
        """Return how many blocks a request can load from tiers in addition to its cached blocks.

        Args:
            name: vLLM's identifier of the request.
            token_ids: tokens of the request.
            num_cached: number of the request's blocks that are cached on the device.

        Returns:
            The number of blocks, or None if the reply to the query has not arrived yet.
        """
        state = self._requests.get(name)
        if state is None:
            return 0
        query = state.query
        if query is not None and query.answer is not None:
            num_blocks = query.first + len(query.answer.slots) - num_cached
            if num_cached >= query.first and num_blocks > 0:
                return num_blocks
            # Meanwhile the device has cached more blocks, or has lost blocks before the answer's
            # first.
            state.may_ask = num_cached < query.first
            self._drop_query(state)
        elif query is not None and self._clock() - state.asked_at > ANSWER_S:
            self._drop_query(state)
        if state.query is None and state.may_ask:
            self._ask(name, state, token_ids, num_cached)
        return 0 if state.query is None else None

    def load(self, name: str, block_ids: Sequence[int], num_blocks: int) -> None:
        """Plan copies to the device for the blocks that `num_matched` has counted.

        Args:
            name: vLLM's identifier of the request.
            block_ids: the request's blocks on the device, starting with its first block.
            num_blocks: number of blocks to load.
        """
        state = self._requests[name]
        query = state.query
        assert query is not None
        assert query.answer is not None, "loaded before it was answered"
        end = query.first + len(query.answer.slots)
        first = end - num_blocks
        slots = query.answer.slots[first - query.first :]
        self._loads += zip(slots, block_ids[first:end], strict=True)
        for block in block_ids[first:end]:
            self._offered_content[block] = self._content_of(block)
        self._read.append(KvRead(number=query.number, num_blocks=num_blocks))
        self._exchange.settle(query)
        state.query = None
        state.num_loaded = num_blocks

    def offer(self, name: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Offer a request's leading blocks, which vLLM has cached, to the tiers.

        The blocks are complete once the step that vLLM is planning has run.
        """
        state = self._requests.get(name)
        if state is None or state.num_offered >= len(block_ids):
            return
        first = state.num_offered
        state.num_offered = len(block_ids)
        keys = self._keys(state, token_ids, len(block_ids))
        for index in range(first, len(block_ids)):
            block = block_ids[index]
            content = self._content_of(block)
            if self._offered_content.get(block) == content:
                continue
            parent = keys[index - 1] if index else None
            is_kept = bool(state.request.session_id)
            if self._exchange.offer(KvBlock(keys[index], parent, is_kept), _Place(block, content)):
                self._offered_content[block] = content

    def plan(self) -> Copies:
        """Return the copies to make in the step that vLLM is planning.

        Each copy is returned only once.
        """
        stored = self._exchange.take_granted(
            lambda place: self._content_of(place.block) == place.content
        )
        stores = tuple((place.block, slot.slot) for slot, place in stored)
        if not stores and not self._loads:
            return Copies(0)
        number = next(self._step_numbers)
        self._steps[number] = _Reported([slot for slot, _ in stored], self._read)
        copies = Copies(number, tuple(self._loads), stores)
        self._loads = []
        self._read = []
        return copies

    def on_copied(self, number: int) -> None:
        """Tell the server that a step's copies are done. Call this when all ranks are done."""
        reported = self._steps.pop(number)
        self._exchange.report(reported.stored, reported.read)

    def _ask(self, name: str, state: _Request, token_ids: Sequence[int], num_cached: int) -> None:
        state.may_ask = False
        request = state.request
        # The last token must be computed, since its logits are needed.
        end = (len(token_ids) - 1) // self._block_tokens
        # The server counted the stored blocks when the request arrived. Blocks of later output are
        # likely to be stored as well.
        is_again = len(request.token_ids) > request.num_prompt_tokens
        if num_cached >= (end if is_again else min(end, request.num_stored_blocks)):
            return
        keys = self._keys(state, token_ids, end)[:end]
        state.query = self._exchange.ask(request.request_id, num_cached, keys)
        state.asked_at = self._clock()

    def _drop_query(self, state: _Request) -> None:
        if state.query is not None:
            self._exchange.drop(state.query)
            state.query = None

    def _keys(self, state: _Request, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return the keys of the request's first `end` blocks, and any later keys already known."""
        if len(state.keys) < end:
            size = self._block_tokens
            salt = state.request.cache_salt
            tokens = token_ids[: end * size]
            state.keys += list(extend_keys(self._space, state.keys, tokens, size, salt))
        return state.keys
