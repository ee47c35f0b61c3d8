"""Decode steps as CUDA graphs, which turn hundreds of kernel launches into one.

A graph replays the captured launches with the same addresses and shapes. Steps with the same number
of rows and the same block table width meet this condition: a batch pads its rows, `kernels.staging`
packs indices at the same addresses, and the arena and the KV pool do not move.
"""

import gc
from collections.abc import Callable, Iterator

import torch

from ullage_engine.kernels.batch import StepBatch

Action = Callable[[], None]
"""Function that launches the operations of a step, from its indices to its logits."""

Capture = Callable[[Action], Action]
"""Function that captures an action and returns a function that replays the capture."""

NewCapture = Callable[[], Capture]
"""Function that starts a set of captures, which share memory and are freed together."""

WIDTH_RATIO = 4
"""Ratio between successive block table widths.

If a table is wider than necessary, decodes waste time on empty splits. On the other hand, each
additional width means more graphs to capture at startup.
"""

LEAST_WIDTH = 64
"""Width of the narrowest block table: 64 blocks of 16 tokens hold 1,024 tokens of context."""


class CudaCapture:
    """A set of CUDA graphs whose temporary tensors share one memory pool.

    After all graphs of a pool are freed, torch cannot capture new graphs into it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, action: Action) -> Action:
        graph = torch.cuda.CUDAGraph()

        # A finalizer that waits for the device would break the capture.
        gc.collect()
        gc.disable()
        try:
            # CUDA calls of other threads are not part of the graph.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                action()
        finally:
            gc.enable()

        replay: Action = graph.replay
        return replay


class StepGraphs:
    """The graphs of one runner, keyed by number of rows and block table width."""

    def __init__(self, new_capture: NewCapture, most_blocks: int) -> None:
        """Prepare to capture graphs for block tables of at most `most_blocks` blocks."""
        self._new_capture = new_capture
        self._capture: Capture | None = None
        self._replays: dict[tuple[int, int], Action] = {}
        self.widths = list(_widths(most_blocks))
        """Widths of the block tables, in blocks, in ascending order."""

    def width(self, blocks: int) -> int:
        """Return the narrowest block table width that fits sequences of up to `blocks` blocks."""
        return next(width for width in self.widths if width >= blocks)

    def capture(self, batch: StepBatch, action: Action) -> None:
        """Capture an action as the graph for steps with the same shapes as `batch`.

        Run the action once beforehand, because compiling and loading kernels cannot be captured.
        """
        self._capture = self._capture or self._new_capture()
        self._replays[_key(batch)] = self._capture(action)

    def find(self, batch: StepBatch) -> Action | None:
        """Return the function that replays this batch's graph, or None if there is no such graph.

        Graphs exist only for steps that consist of decodes and sample every row. Before replaying a
        graph, upload the batch's indices.
        """
        is_whole = len(batch.sampled) == batch.num_tokens
        if len(batch.rows.prompts.counts) or not is_whole:
            return None
        return self._replays.get(_key(batch))

    def clear(self) -> None:
        """Free all graphs. Call this when the addresses they use are no longer valid."""
        self._replays.clear()
        self._capture = None

    def __len__(self) -> int:
        return len(self._replays)


def _key(batch: StepBatch) -> tuple[int, int]:
    rows, width = batch.rows.decode_tables.shape
    return rows, width


def _widths(most_blocks: int) -> Iterator[int]:
    width = LEAST_WIDTH
    while width < most_blocks:
        yield width
        width *= WIDTH_RATIO
    yield most_blocks
