"""Dtype names, and the choice of the dtype in which a device computes."""

from pathlib import Path
from typing import Literal

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

KvDtype = Literal["auto", "fp8"]
"""Data type of the KV cache.

`fp8` is float8 E4M3. With `auto`, the decoder chooses the type
(`ullage_engine.layers.native_decoder.auto_kv_type`).
"""


def kv_itemsize(kv_dtype: KvDtype, dtype: torch.dtype) -> int:
    """Return the size in bytes of a KV cache element if the model computes in `dtype`."""
    return torch.float8_e4m3fn.itemsize if kv_dtype == "fp8" else dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16", "float16"], device: torch.device
) -> torch.dtype:
    """Return the dtype of weights and activations.

    With `auto`, it is bfloat16 if the device has instructions for it, otherwise float32.
    """
    if name != "auto":
        return DTYPES[name]
    fast = device.type == "cuda" or cpu_computes_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device is a CPU that has to emulate matmuls in this dtype.

    Emulation is slower than float32.
    """
    return dtype is torch.bfloat16 and device.type == "cpu" and not cpu_computes_bfloat16()


def cpu_computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has bfloat16 matmul instructions. Emulation is slower than float32."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # x86 says "flags", Arm "Features".
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
