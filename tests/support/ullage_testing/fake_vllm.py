"""A stand-in for vLLM's engine behind `ullage_engine.vllm_worker.interface`.

It allocates blocks by the rules that tests/vllm finds vLLM to follow: whole blocks of a prompt
before its last token are shared, also within one step. A request holds the blocks of all tokens but
the newest. Blocks of windows are given back as they are slid past. What is freed stays cached until
it is needed. Where vLLM would preempt it fails.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.vllm_worker.interface import (
    AdapterError,
    CoreOutput,
    InvalidRequestError,
    Prefix,
)

VOCABULARY = 1000


def next_token(token_ids: Sequence[int]) -> int:
    """Returns the token that follows, a function of all before it."""
    return (sum(token_ids) * 31 + len(token_ids) * 7) % VOCABULARY


class PreemptedError(AssertionError):
    """vLLM would have preempted a request for memory."""


@dataclass(eq=False, slots=True)
class Block:
    """One block of the pool."""

    ref_count: int = 0
    content: object = None
    """The cached content: the group and all tokens up to its end, or None for nothing."""


class FakePrefix:
    """Blocks that are held."""

    def __init__(self, lasting: list[Block], of_windows: list[Block]) -> None:
        self.lasting = lasting
        self.of_windows = of_windows

    @property
    def blocks(self) -> list[Block]:
        return self.lasting + self.of_windows

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_held(self) -> float:
        return len(self.lasting) + sum(1 / block.ref_count for block in self.of_windows)


def _count(tables: list[list[Block | None]]) -> int:
    return sum(block is not None for table in tables for block in table)


@dataclass(eq=False, slots=True)
class Running:
    """A request that vLLM has."""

    request: EngineRequest
    token_ids: list[int]
    max_tokens: int
    order: tuple[int, int]
    started: tuple[int, int] = (0, 0)
    """Its place among those that have started."""
    num_produced: int = 0
    num_computed: int = 0
    num_cached: int = 0
    tables: list[list[Block | None]] = field(default_factory=list)
    """Blocks of each group, or None where the window has moved past them."""


class FakeVllm:
    """`Core` and `Blocks` in one."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        windows: Sequence[int] = (0,),
        chunk_tokens: int = 64,
        max_running: int = 64,
        stop_token: int = -1,
        adapter_slots: int | None = None,
    ) -> None:
        """`windows`: the length of each group's window in tokens, 0 for one that grows.
        `adapter_slots`: None: it does not matter which adapters are loaded."""
        self.num_blocks = num_blocks
        self.max_running = max_running
        self.broken: dict[str, tuple[str, str]] = {}
        """Why requests are given up at their first token, and the field at fault."""
        self.most_held: dict[str, int] = {}
        """Most blocks that each request held at a time."""
        self.adapters: dict[str, str] = {}
        """Folders of adapters, by name."""
        self.loaded: list[str] = []
        """Adapters in slots, in the order in which they were loaded."""
        self.unreadable: set[str] = set()
        """Adapters that cannot be loaded."""
        self._adapter_slots = adapter_slots
        self._size = block_tokens
        self._windows = windows
        self._chunk_tokens = chunk_tokens
        self._stop_token = stop_token
        self._free: OrderedDict[Block, None] = OrderedDict(
            (Block(), None) for _ in range(num_blocks)
        )
        self._cached: dict[object, dict[Block, None]] = {}
        """Blocks by what they cache, which may be the same, the first ones first."""
        self._requests: dict[str, Running] = {}
        self._ended: dict[str, Running] = {}
        self._of_sessions: list[FakePrefix] = []
        self._num_added = self._num_started = 0

    @property
    def blocks(self) -> "FakeVllm":
        return self

    # Blocks --------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_held(self, request_id: str) -> float:
        running = self._requests.get(request_id)
        tables = running.tables if running else []
        return sum(
            1 / block.ref_count if window else 1
            for window, table in zip(self._windows, tables, strict=bool(tables))
            for block in table
            if block is not None
        )

    def num_in_tables(self, request_id: str) -> int:
        running = self._requests.get(request_id)
        return _count(running.tables) if running else 0

    def num_computed(self, request_id: str) -> int:
        running = self._requests.get(request_id)
        return running.num_computed if running else 0

    def hold_prefix(self, request_id: str) -> Prefix:
        running = self._requests.get(request_id) or self._ended[request_id]
        parts: tuple[list[Block], list[Block]] = ([], [])
        for window, table in zip(self._windows, self._match(running)[1], strict=True):
            parts[window > 0].extend(block for block in table if block is not None)
        prefix = FakePrefix(*parts)
        for block in prefix.blocks:
            self._take(block)
        return prefix

    @property
    def num_reclaimable(self) -> float:
        lasting = Counter[Block]()
        of_windows = Counter[Block]()
        for prefix in self._of_sessions:
            lasting.update(prefix.lasting)
            of_windows.update(prefix.of_windows)
        own = sum(count == block.ref_count for block, count in lasting.items())
        return own + sum(count / block.ref_count for block, count in of_windows.items())

    def on_session(self, prefix: Prefix) -> None:
        assert isinstance(prefix, FakePrefix)
        self._of_sessions.append(prefix)

    def on_session_end(self, prefix: Prefix) -> None:
        assert isinstance(prefix, FakePrefix)
        self._of_sessions.remove(prefix)

    def release(self, prefix: Prefix) -> None:
        assert isinstance(prefix, FakePrefix)
        assert prefix not in self._of_sessions, "a session still counts it"
        for block in reversed(prefix.blocks):
            self._give_back(block)

    # Core ----------------------------------------------------------------------------------------

    def is_compiled(self, grammar: str) -> bool:
        return True

    def add_adapter(self, name: str, folder: str) -> None:
        assert name not in self.adapters, "added twice"
        self.adapters[name] = folder

    def remove_adapter(self, name: str) -> None:
        assert name not in self.loaded, "it is in a slot"
        self.adapters.pop(name, None)

    def check_adapter(self, name: str) -> None:
        if name in self.unreadable:
            raise AdapterError(name, f"there is no {self.adapters[name]}")

    def load_adapter(self, name: str) -> None:
        assert name not in self.loaded, "loaded twice"
        assert len(self.loaded) < (self._adapter_slots or 0), "no slot is free"
        self.check_adapter(name)
        self.loaded.append(name)

    def unload_adapter(self, name: str) -> None:
        assert all(each.request.adapter != name for each in self._requests.values()), "it is used"
        self.loaded.remove(name)

    def add(self, request: EngineRequest, max_tokens: int) -> None:
        if request.sampling.temperature > 2:
            raise InvalidRequestError("temperature: is above 2", "temperature")
        assert request.request_id not in self._requests, "added twice"
        assert max_tokens > 0 or request.embed, "nothing to produce"
        is_loaded = request.adapter in ("", *self.loaded)
        assert is_loaded or self._adapter_slots is None, "its adapter is not loaded"
        self._num_added += 1
        order = (-request.priority, self._num_added)
        self._requests[request.request_id] = Running(
            request, list(request.token_ids), max_tokens, order
        )

    def abort(self, request_id: str) -> None:
        running = self._requests.pop(request_id, None)
        self._ended.pop(request_id, None)
        if running is not None:
            self._free_tables(running)

    def forget(self, request_id: str) -> None:
        self._ended.pop(request_id, None)

    def set_max_running(self, num_requests: int) -> None:
        self.max_running = num_requests

    def step(self) -> list[CoreOutput]:
        outputs = []
        budget = self._chunk_tokens
        num_running = sum(bool(each.tables) for each in self._requests.values())
        # Those that run go on in the order in which they started, whatever their priorities.
        ranked = sorted(
            self._requests.values(),
            key=lambda each: (not each.tables, each.started if each.tables else each.order),
        )
        for each in ranked:
            if not each.tables:
                if num_running >= self.max_running or budget <= 0:
                    break
                num_running += 1
                self._begin(each)
            count = min(len(each.token_ids) - each.num_computed, budget)
            if count <= 0:
                continue
            budget -= count
            self._compute(each, count)
            if each.num_computed == len(each.token_ids):
                outputs.append(self._produce(each))
        return outputs

    # --------------------------------------------------------------------------------------------

    def _begin(self, running: Running) -> None:
        self._num_started += 1
        running.started = (self._num_started, 0)
        num_hits, running.tables = self._match(running)
        for table in running.tables:
            for block in table:
                if block is not None:
                    self._take(block)
        running.num_computed = running.num_cached = num_hits * self._size

    def _compute(self, running: Running, count: int) -> None:
        end = running.num_computed + count
        for group, (window, table) in enumerate(zip(self._windows, running.tables, strict=True)):
            if window:
                self._slide(table, max(0, running.num_computed - window + 1) // self._size)
            for _ in range(-(-end // self._size) - len(table)):
                table.append(self._allocate())
            for index in range(end // self._size):
                block = table[index]
                if block is not None and block.content is None:
                    self._cache(block, self._content(running, group, index))
        running.num_computed = end
        held = _count(running.tables)
        request_id = running.request.request_id
        self.most_held[request_id] = max(held, self.most_held.get(request_id, 0))

    def _produce(self, running: Running) -> CoreOutput:
        if running.request.embed:
            return self._embed(running)
        if running.request.request_id in self.broken:
            self.abort(running.request.request_id)
            error, broken_field = self.broken[running.request.request_id]
            return CoreOutput(
                running.request.request_id, [], "error", error=error, field=broken_field
            )
        token = next_token(running.token_ids)
        running.token_ids.append(token)
        running.num_produced += 1
        request_id = running.request.request_id
        is_stop = token in running.request.stop_token_ids
        is_full = running.num_produced == running.max_tokens
        if is_stop or is_full:
            del self._requests[request_id]
            self._ended[request_id] = running
            self._free_tables(running)
        finish = "stop" if is_stop else "length" if is_full else ""
        return CoreOutput(request_id, [token], finish, num_cached_tokens=running.num_cached)  # type: ignore[arg-type]

    def _embed(self, running: Running) -> CoreOutput:
        request_id = running.request.request_id
        self._ended[request_id] = self._requests.pop(request_id)
        self._free_tables(running)
        return CoreOutput(
            request_id, [], embedding=bytes([next_token(running.token_ids) % 256] * 4)
        )

    def _match(self, running: Running) -> tuple[int, list[list[Block | None]]]:
        """Finds the whole blocks of a request's tokens before its last that all groups have."""
        for num_hits in range((len(running.token_ids) - 1) // self._size, 0, -1):
            tables = [self._hits(running, group, num_hits) for group in range(len(self._windows))]
            if all(tables):
                return num_hits, tables
        return 0, [[] for _ in self._windows]

    def _hits(self, running: Running, group: int, num_hits: int) -> list[Block | None]:
        window = self._windows[group]
        first = max(0, num_hits * self._size - window + 1) // self._size if window else 0
        found = [
            next(iter(self._cached.get(self._content(running, group, index), ())), None)
            for index in range(first, num_hits)
        ]
        return [None] * first + found if all(found) else []

    def _content(self, running: Running, group: int, index: int) -> object:
        tokens = tuple(running.token_ids[: (index + 1) * self._size])
        return running.request.cache_salt, running.request.adapter, group, tokens

    def _slide(self, table: list[Block | None], count: int) -> None:
        for index in reversed(range(min(count, len(table)))):
            block = table[index]
            table[index] = None
            if block is not None:
                self._give_back(block)

    def _allocate(self) -> Block:
        if not self._free:
            raise PreemptedError("no block is free")
        block, _ = self._free.popitem(last=False)
        if block.content is not None:
            alike = self._cached[block.content]
            del alike[block]
            if not alike:
                del self._cached[block.content]
        block.content = None
        block.ref_count = 1
        return block

    def _cache(self, block: Block, content: object) -> None:
        self._cached.setdefault(content, {})[block] = None
        block.content = content

    def _take(self, block: Block) -> None:
        self._free.pop(block, None)
        block.ref_count += 1

    def _give_back(self, block: Block) -> None:
        block.ref_count -= 1
        assert block.ref_count >= 0, "given back twice"
        if block.ref_count == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=block.content is not None)

    def _free_tables(self, running: Running) -> None:
        for table in running.tables:
            for block in reversed(table):
                if block is not None:
                    self._give_back(block)
        running.tables = []
