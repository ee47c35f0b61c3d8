"""GGUF's blocks of 32 numbers of four bits, kept as they are.

Q4_0 is a float16 scale d and 16 bytes, weight = d * (q - 8); Q4_1 has a float16 minimum m after the
scale, weight = d * q + m. MXFP4 is a scale of one byte and 16 bytes. Low halves of the bytes are
the first 16 numbers.
"""

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.quant.formats import LEAST, Quantized

BLOCK = 32

KEPT = ("Q4_0", "Q4_1")


def read_blocks(data: npt.NDArray[np.uint8], kind: str) -> Quantized:
    """A matrix of either kind from its rows [out, bytes]."""
    blocks = torch.from_numpy(np.array(data)).view(data.shape[0], -1, 18 if kind == "Q4_0" else 20)
    scales = _half(blocks, 0)
    codes = blocks[..., -BLOCK // 2 :]
    values = torch.cat([codes & 15, codes >> 4], dim=2).view(torch.int8) + LEAST["int4"]
    zeros = _half(blocks, 2) + 8 * scales if kind == "Q4_1" else torch.zeros_like(scales)
    return Quantized("int4", values.flatten(1), scales, zeros)


def read_mxfp4(data: npt.NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 to 15 [..., in] and scales [..., groups] from [..., bytes], both uint8."""
    blocks = torch.from_numpy(np.array(data)).view(*data.shape[:-1], -1, 17)
    codes = blocks[..., 1:]
    return torch.cat([codes & 15, codes >> 4], dim=-1).flatten(-2), blocks[..., 0]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at a byte of each block, as float32."""
    stored = blocks[..., start : start + 2].contiguous()
    return stored.view(torch.float16).squeeze(2).to(torch.float32)
