"""Every kernel compiles to machine code for H100s, which needs no GPU; and for A100s with
ULLAGE_TEST_ARCHS=80,90."""

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""A program may have (CUDA programming guide, compute capabilities)."""

PRODUCTS = {"attend_split", "attend_tile", "multiply_tile", "multiply_expert"}
OTHERS = {"merge_splits", "convolve_row", "count"}
ARCHS = [int(arch) for arch in os.environ.get("ULLAGE_TEST_ARCHS", "90").split(",")]


def test_kernels_compile(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script), *map(str, ARCHS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(kernel["name"], kernel["arch"]) for kernel in kernels} == {
        (name, arch) for name in PRODUCTS | OTHERS for arch in ARCHS
    }
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[kernel["arch"]], kernel
        assert kernel["uses_tensor_cores"] == (kernel["name"] in PRODUCTS), kernel
