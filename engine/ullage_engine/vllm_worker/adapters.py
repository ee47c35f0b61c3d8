"""Manages LoRA adapters: predicts their memory use, sizes the slots and assigns them.

vLLM keeps loaded adapters in slots, all of the same size, which it allocates at startup. An adapter
is loaded when one of its requests starts, either into a free slot or into the slot of an unused
adapter.
"""

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safetensors import safe_open

from ullage_common.config.engine import AdaptersFile, EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.model_loader.files import weight_files
from ullage_engine.model_loader.source import resolve_adapter
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.vllm_worker.interface import AdapterError, Core
from ullage_engine.vllm_worker.sequence import VllmSequence

log = logging.getLogger("ullage.engine.vllm")

_UNADAPTED = ("bias", "scale", "scales", "scale_inv", "zeros", "qzeros")
"""Name suffixes of tensors that are not weight matrices and therefore get no LoRA matrices."""
_LOOK_S = 5.0
"""Interval at which a follower rereads the list of adapters, in seconds."""
_NUMBERS_OF = {"I32": 8}
"""Number of 4-bit weights packed into one element of a quantised tensor, by its dtype."""


def slot_bytes(folder: Path, rank: int, item_bytes: int) -> int:
    """Predict how many bytes one adapter occupies on a device that holds all layers.

    An adapter has two matrices of rank `rank` for each weight matrix of the model.

    Args:
        folder: folder of the checkpoint.
        rank: LoRA rank of a slot.
        item_bytes: bytes per element.

    Returns:
        The size in bytes, or 0 if the folder has no safetensors files.

    Raises:
        WeightsError: the checkpoint is incomplete.
    """
    if not any(folder.glob("*.safetensors")):
        return 0
    sides: dict[str, int] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                sides[name] = _sides(name, tensor.get_dtype(), tensor.get_shape())
    if not any("lm_head" in name for name in sides):
        # The output layer has adapter matrices of its own even if it shares the embedding's.
        sides["lm_head"] = sum(each for name, each in sides.items() if "embed_tokens" in name)
    return sum(sides.values()) * rank * item_bytes


def _sides(name: str, dtype: str, shape: list[int]) -> int:
    """Return a weight matrix's input size plus output size, or 0 for any other tensor.

    A LoRA adapter of rank r stores r times this many elements for the matrix. For a tensor that
    stacks several experts, return the sum over all experts.
    """
    if len(shape) < 2 or name.replace("_", ".").endswith(_UNADAPTED):
        return 0
    *experts, rows, columns = shape
    packed = _NUMBERS_OF.get(dtype, 1)
    # The format does not say which dimension is packed. The more even shape is likelier.
    return math.prod(experts) * min(rows * packed + columns, rows + columns * packed)


def num_slots(most: int, room_bytes: int, size: int, *, copy_bytes: int, num_spare: int) -> int:
    """Return how many adapters can be loaded at a time: at least one and at most `most`.

    Args:
        most: configured maximum.
        room_bytes: memory available for adapters.
        size: bytes per slot.
        copy_bytes: bytes that each loaded adapter takes besides its slot, also out of `room_bytes`.
        num_spare: number of slots that must stay empty.
    """
    each = size + copy_bytes
    fitting = (room_bytes - num_spare * size) // each if each else most
    return max(1, min(most, fitting))


def fetch_adapters(config: EngineConfig) -> None:
    """Download the adapters that a follower's ranks will load, and retry failed downloads.

    If the adapters are listed in a file, reread it periodically and never return. The follower's
    ranks load an adapter at the same time as the leader's ranks, and need its files on this node.
    """
    path = Path(config.adapters_file) if config.adapters_file else None
    present: set[str] = set()
    logged: dict[str, str] = {}
    while True:
        wanted = config.adapters
        if path:
            try:
                wanted = read_file(path, AdaptersFile).adapters
            except Exception:  # the leader's server logs the error
                wanted = ()
        for source in {each.source for each in wanted} - present:
            try:
                resolve_adapter(source)
                present.add(source)
            except Exception as error:  # the thread must go on to fetch the others
                if logged.get(source) != str(error):
                    logged[source] = str(error)
                    _log_failure(source, error)
        if path is None and len(present) == len({each.source for each in config.adapters}):
            return
        time.sleep(_LOOK_S)


def _log_failure(source: str, error: Exception) -> None:
    if isinstance(error, WeightsError):
        log.error("%s", error)
    else:
        log.error("the adapter %s cannot be fetched; retrying", source, exc_info=error)


class Turns:
    """Assigns adapter slots to sequences, in the order in which the sequences request slots.

    Sequences must request slots in order of importance, so that none starves. A sequence that finds
    all slots in use claims the slot of the least recently used adapter. Later sequences that need
    that adapter then have to wait.
    """

    def __init__(
        self, names: Collection[str], loaded: Collection[str], in_use: Collection[str], free: int
    ) -> None:
        """Take a snapshot of the adapters and their slots.

        Args:
            names: all adapters.
            loaded: adapters in slots, least recently used first.
            in_use: adapters that running requests use.
            free: number of empty slots.
        """
        self._names = names
        self._in_use = in_use
        self._loaded = loaded
        self._others = list(loaded)
        """Loaded adapters whose slots no sequence has requested or claimed yet."""
        self._free = free
        self._slots: dict[str, str | None] = {}

    def slot_for(self, adapter: str) -> str | None:
        """Assign a slot to `adapter`, and return the adapter that must be unloaded from it first.

        Returns:
            The name of the adapter to unload. An empty string if `adapter` is already loaded, gets
            a free slot or needs no slot. None if no slot is available yet.
        """
        if adapter not in self._names:
            return ""
        if adapter not in self._slots:
            self._slots[adapter] = self._find(adapter)
        return self._slots[adapter]

    def _find(self, adapter: str) -> str | None:
        if adapter in self._others:
            self._others.remove(adapter)
            return ""
        if adapter in self._loaded:
            return None  # its slot is claimed by another adapter, so it waits for a slot itself
        if self._free:
            self._free -= 1
            return ""
        unused = [each for each in self._others if each not in self._in_use]
        for each in (unused or self._others)[:1]:
            self._others.remove(each)
        return unused[0] if unused else None


class Adapters:
    """An engine's adapters, which can be added and removed while it serves requests."""

    def __init__(self, core: Core, num_slots: int) -> None:
        self._core = core
        self._names: set[str] = set()
        self._num_slots = num_slots
        self._loaded: list[str] = []
        """Loaded adapters, least recently used first."""
        self.num_loads = self.num_unloads = 0

    def slot_for(
        self,
        sequence: VllmSequence,
        holders: Iterable[VllmSequence],
        waiting: Iterable[VllmSequence],
    ) -> str | None:
        """Find a slot for the sequence's adapter, and return the adapter to unload from it first.

        Waiting sequences that rank before this one get slots first.

        Returns:
            The name of the adapter to unload. An empty string if the sequence's adapter is already
            loaded, gets a free slot or needs no slot. None if no slot is available yet.
        """
        if sequence.request.adapter not in self._names:
            return ""
        turns = self._turns(holders)
        for each in waiting:
            if each.rank < sequence.rank:
                turns.slot_for(each.request.adapter)
        return turns.slot_for(sequence.request.adapter)

    def with_slots(
        self, holders: Iterable[VllmSequence], waiting: Iterable[VllmSequence]
    ) -> Iterator[VllmSequence]:
        """Yield, in order, the waiting sequences that do not have to wait for an adapter slot."""
        turns = self._turns(holders)
        for each in waiting:
            if turns.slot_for(each.request.adapter) is not None:
                yield each

    def _turns(self, holders: Iterable[VllmSequence]) -> Turns:
        """Return a snapshot of the slots. Adapters of running sequences count as in use."""
        in_use = {each.request.adapter for each in holders if each.is_running}
        free = self._num_slots - len(self._loaded)
        return Turns(self._names, self._loaded, in_use, free)

    def use(self, adapter: str, slot: str) -> None:
        """Load an adapter for a request that is about to run, or mark it as recently used.

        Args:
            adapter: the request's adapter.
            slot: adapter to unload first, or an empty string, as returned by `slot_for`.

        Raises:
            AdapterError: the adapter cannot be loaded. The slot stays free.
        """
        if adapter not in self._names:
            return
        if adapter in self._loaded:
            self._loaded.remove(adapter)
        else:
            if slot:
                self._unload(slot)
            self._load(adapter)
        self._loaded.append(adapter)

    def add(self, name: str, folder: str, *, is_checked: bool) -> str:
        """Make an adapter available to requests. Return an error message, or "" on success.

        The adapter is loaded immediately if a slot is free. Otherwise its files are only read and
        checked, so that the check does not take a slot away from any request.

        Args:
            name: name of the adapter.
            folder: folder of its files.
            is_checked: whether a previous worker has already loaded the adapter, so that the check
                can be skipped.
        """
        self._core.add_adapter(name, folder)
        try:
            if is_checked:
                pass
            elif len(self._loaded) < self._num_slots:
                self._load(name)
                self._loaded.append(name)
            else:
                self._core.check_adapter(name)
        except AdapterError as error:
            self._core.remove_adapter(name)
            return error.reason
        self._names.add(name)
        return ""

    def remove(self, name: str) -> None:
        """Remove an adapter that no request is using, and free its slot."""
        if name in self._loaded:
            self._unload(name)
        self._names.discard(name)
        self._core.remove_adapter(name)

    def _load(self, adapter: str) -> None:
        started = time.perf_counter()
        try:
            self._core.load_adapter(adapter)
        except AdapterError as error:
            log.error("adapter %s cannot be loaded: %s", adapter, error.reason)
            raise
        self.num_loads += 1
        log.info("loaded adapter %s in %.3f s", adapter, time.perf_counter() - started)

    def _unload(self, adapter: str) -> None:
        self._core.unload_adapter(adapter)
        self._loaded.remove(adapter)
        self.num_unloads += 1
        log.info("unloaded adapter %s", adapter)
