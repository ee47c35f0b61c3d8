"""Turns an arena's layout into tensors, and tells what tensors take."""

from collections.abc import Iterable

import torch

from ullage_engine.memory.arena import ArenaLayout


def allocate(
    layout: ArenaLayout, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """One allocation, every page touched; flat views of it by name.

    Four-byte buffers are float32, one-byte buffers uint8, others `dtype`.
    """
    types = {1: torch.uint8, 4: torch.float32}
    # empty and zero_, because zeros would leave the pages unbacked until first use.
    storage = torch.empty(layout.nbytes, dtype=torch.uint8, device=device).zero_()
    return {
        buffer.name: storage[buffer.offset : buffer.end].view(types.get(buffer.itemsize, dtype))
        for buffer in layout.buffers
    }


def shaped(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """The start of a flat buffer, as a contiguous tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return buffer[:count].view(shape)


def storage_bytes(tensors: Iterable[torch.Tensor], alignment: int = 1) -> int:
    """Bytes of all memory that these tensors are views of, each piece of it counted once.

    `alignment` rounds every piece up, as laying it out in a file does.
    """
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(-(-each.nbytes() // alignment) * alignment for each in storages.values())
