"""LoRA adapters: what one takes while it is loaded, how many are, and which.

vLLM computes with adapters that are in its slots, which are allocated at the start and all of one
size. An adapter is loaded when a request of it starts, into a free slot or into the one of an
adapter that nobody uses.
"""

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safetensors import safe_open

from ullage_common.config.engine import AdaptersFile, EngineConfig
from ullage_common.process.config_file import ConfigError, read_file
from ullage_engine.model_loader.files import weight_files
from ullage_engine.model_loader.source import resolve_adapter
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.vllm_worker.interface import AdapterError, Core
from ullage_engine.vllm_worker.sequence import Sequence

log = logging.getLogger("ullage.engine.vllm")

_UNADAPTED = ("bias", "scale", "scales", "scale_inv", "zeros", "qzeros")
"""Last words of the names of tensors that are no matrices of a layer."""
_LOOK_S = 5.0
"""Seconds between a following node's looks at which adapters it needs."""
_NUMBERS_OF = {"I32": 8}
"""Numbers of four bits that formats pack into one of these types."""


def slot_bytes(folder: Path, rank: int, item_bytes: int) -> int:
    """Predicts what an adapter takes of a device that has all layers of the checkpoint in `folder`:
    two matrices of `rank` for each of the model's. 0: there are no safetensors to tell it by.

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
        # The output layer has matrices of its own even where it shares the embedding's.
        sides["lm_head"] = sum(each for name, each in sides.items() if "embed_tokens" in name)
    return sum(sides.values()) * rank * item_bytes


def _sides(name: str, dtype: str, shape: list[int]) -> int:
    """Returns a matrix's inputs and outputs, of all experts together; 0 of what is no matrix."""
    if len(shape) < 2 or name.replace("_", ".").endswith(_UNADAPTED):
        return 0
    *experts, rows, columns = shape
    packed = _NUMBERS_OF.get(dtype, 1)
    # Which of the two is packed is not said, and the more even shape is likelier.
    return math.prod(experts) * min(rows * packed + columns, rows + columns * packed)


def num_slots(most: int, room_bytes: int, size: int, *, copy_bytes: int, num_spare: int) -> int:
    """Returns how many adapters are loaded at a time: `most`, or as many as there is room for, and
    one at least.

    Args:
        size: bytes of a slot.
        copy_bytes: bytes that a loaded adapter takes of the same memory beside its slot.
        num_spare: slots that stay empty.
    """
    each = size + copy_bytes
    fitting = (room_bytes - num_spare * size) // each if each else most
    return max(1, min(most, fitting))


def fetch_adapters(config: EngineConfig) -> None:
    """Bring the files of adapters to a node that follows, now and when they are edited, until the
    process ends: its ranks load them where the leader does."""
    path = Path(config.adapters_file) if config.adapters_file else None
    present: set[str] = set()
    while True:
        with contextlib.suppress(ConfigError):  # the leader's server says what is wrong with it
            wanted = read_file(path, AdaptersFile).adapters if path else config.adapters
            for source in {each.source for each in wanted} - present:
                try:
                    resolve_adapter(source)
                    present.add(source)
                except WeightsError as error:
                    log.error("%s", error)
        if path is None and len(present) == len({each.source for each in config.adapters}):
            return
        time.sleep(_LOOK_S)


class Turns:
    """Who may have a slot now, asked in the order of importance.

    Nobody is overtaken for ever: who comes to wait while all slots are in use has the least
    recently used adapter give way to its own, for which nobody who is asked later may start.
    """

    def __init__(
        self, names: Collection[str], loaded: Collection[str], in_use: Collection[str], free: int
    ) -> None:
        """`names`: all adapters. `loaded`: those in slots, the least recently used first. `in_use`:
        those of requests that run. `free`: empty slots."""
        self._names = names
        self._in_use = in_use
        self._loaded = loaded
        self._others = list(loaded)
        """Loaded adapters that nobody has asked for, and that give way to nobody."""
        self._free = free
        self._slots: dict[str, str | None] = {}

    def slot_for(self, adapter: str) -> str | None:
        """Returns the adapter that the next one's takes the slot of; empty: none, None: it waits
        for a slot."""
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
            return None  # it gives way, and has its turn when it has
        if self._free:
            self._free -= 1
            return ""
        unused = [each for each in self._others if each not in self._in_use]
        for each in (unused or self._others)[:1]:
            self._others.remove(each)
        return unused[0] if unused else None


class Adapters:
    """The adapters of an engine, which come and go while it serves, and those that are loaded."""

    def __init__(self, core: Core, num_slots: int) -> None:
        self._core = core
        self._names: set[str] = set()
        self._num_slots = num_slots
        self._loaded: list[str] = []
        """The least recently used first."""
        self.num_loads = self.num_unloads = 0

    def slot_for(
        self, sequence: Sequence, holders: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> str | None:
        """Returns the adapter that a sequence's takes the slot of when all of `waiting` that are
        more important have had their turns; empty: none, None: it waits for a slot."""
        if sequence.request.adapter not in self._names:
            return ""
        turns = self._turns(holders)
        for each in waiting:
            if each.rank < sequence.rank:
                turns.slot_for(each.request.adapter)
        return turns.slot_for(sequence.request.adapter)

    def with_slots(
        self, holders: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """Yields of those that wait, in the order of their importance, whose adapters have slots or
        can have them."""
        turns = self._turns(holders)
        for each in waiting:
            if turns.slot_for(each.request.adapter) is not None:
                yield each

    def _turns(self, holders: Iterable[Sequence]) -> Turns:
        """`holders`: all sequences, of which those that run use their adapters."""
        in_use = {each.request.adapter for each in holders if each.is_running}
        free = self._num_slots - len(self._loaded)
        return Turns(self._names, self._loaded, in_use, free)

    def use(self, adapter: str, slot: str) -> None:
        """Loads the adapter of a request that is going to run, in a slot that its turn gave it.

        Raises:
            AdapterError: it cannot be loaded; the slot is free.
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
        """Serve one more adapter; return why it cannot be loaded, empty: it can.

        It is loaded for that where a slot is free. Otherwise its files are read as for a load, so
        that no request waits for a slot that only this one had.

        Args:
            is_checked: whether a former worker has loaded it, so that the next load is a request's.
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
        """Forget an adapter that no request has, and give back its slot."""
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
