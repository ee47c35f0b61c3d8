"""What a runner launches compiles to machine code that fits a GPU's registers and shared memory.

That needs no GPU. The gate compiles the variants that most models take for three architectures, and
a sample of the others for one; `make test-slow` compiles all of them for all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""A program may have, by architecture (CUDA programming guide, compute capabilities)."""

FEW_BYTES = 16
"""Four registers: so many are spilled by attention over float8 KV (all but sm90) and by few rows
with plain experts (sm80)."""

SM100_BYTES = 160
"""What products of many rows spill on sm100, of int4 and of int8 in groups: tiles half as wide
spill nothing there, and wait for a GPU to say what they cost elsewhere."""

PRODUCTS = {"attend_split", "attend_tile", "multiply_tile", "multiply_expert"}
OTHERS = {"merge_splits", "convolve_row", "count", "norm_row", "gate_columns", "rotate_heads"}


def compiled(*given: str) -> list[dict[str, Any]]:
    """Lists what `compile_kernels.py` says of each kernel."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(kernels: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for kernel in kernels:
        # No tensor core computes in float32, which is for comparisons and need not be fast.
        is_exact = "float32" in kernel["variant"]
        if kernel["shared"] > SHARED_BYTES[kernel["arch"]]:
            wrong.append(f"too much shared memory: {kernel}")
        is_wide = kernel["arch"] == 100 and kernel["name"].startswith("multiply")
        if kernel["spilled"] > (SM100_BYTES if is_wide else FEW_BYTES) and not is_exact:
            wrong.append(f"registers are spilled: {kernel}")
        if kernel["uses_tensor_cores"] != (kernel["name"] in PRODUCTS and not is_exact):
            wrong.append(f"tensor cores: {kernel}")
    return wrong


def test_common_variants_for_every_architecture_and_a_sample() -> None:
    kernels = compiled("90:common,sample", "80:common", "100:common")
    assert {kernel["name"] for kernel in kernels} == PRODUCTS | OTHERS
    assert not (wrong := faults(kernels)), "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_variant(arch: int) -> None:
    kernels = compiled(f"{arch}:every")
    assert {kernel["name"] for kernel in kernels} == PRODUCTS | OTHERS
    assert not (wrong := faults(kernels)), "\n".join(wrong)
