"""Steps of nothing but decodes as CUDA graphs: hundreds of launches become one.

A graph repeats what was launched while it was captured, at the same addresses and in the same
shapes. Steps with as many rows and as wide block tables share both: a batch pads its rows,
`kernels.staging` packs indices to the same places, and the arena and the KV pool do not move.
"""

import gc
from collections.abc import Callable, Iterator

import torch

from ullage_engine.kernels.batch import StepBatch

Action = Callable[[], None]
"""What a step does on the device, from its indices to its logits."""

Capture = Callable[[Action], Action]
"""Function from an action to what repeats it."""

NewCapture = Callable[[], Capture]
"""Function that begins a set of captures, which share memory and are forgotten together."""

WIDTH_RATIO = 4
"""Ratio of neighbouring widths of block tables. A wider table costs a decode empty splits, and each
width costs graphs at start."""

LEAST_WIDTH = 64
"""Blocks of the narrowest table: contexts of 1,024 tokens with blocks of 16."""


class CudaCapture:
    """Captures CUDA graphs, whose temporaries share one pool of memory.

    Once all graphs of a pool are gone, torch takes no new ones into it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, action: Action) -> Action:
        graph = torch.cuda.CUDAGraph()
        # A finalizer that waits for the device would end the capture.
        gc.collect()
        gc.disable()
        try:
            # What other threads ask of CUDA meanwhile is no part of the graph.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                action()
        finally:
            gc.enable()
        replay: Action = graph.replay
        return replay


class StepGraphs:
    """The graphs of one runner, by rows and by width of the block tables."""

    def __init__(self, new_capture: NewCapture, most_blocks: int) -> None:
        """`most_blocks`: width of the widest table, in blocks."""
        self._new_capture = new_capture
        self._capture: Capture | None = None
        self._replays: dict[tuple[int, int], Action] = {}
        self.widths = list(_widths(most_blocks))
        """Blocks of the tables, the widest last."""

    def width(self, blocks: int) -> int:
        """Return the width of tables for sequences of at most so many blocks."""
        return next(width for width in self.widths if width >= blocks)

    def capture(self, batch: StepBatch, action: Action) -> None:
        """Capture what a step like this batch does.

        The action has run before: what it compiles or loads cannot be captured.
        """
        self._capture = self._capture or self._new_capture()
        self._replays[_key(batch)] = self._capture(action)

    def find(self, batch: StepBatch) -> Action | None:
        """Return what computes the batch once its indices are on the device; None: no graph does.

        A graph samples all of its rows, and has no prompts.
        """
        is_whole = len(batch.sampled) == batch.num_tokens
        if len(batch.rows.prompts.counts) or not is_whole:
            return None
        return self._replays.get(_key(batch))

    def clear(self) -> None:
        """Forget all graphs, whose addresses no longer hold."""
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
