"""No step asks for a variant of a kernel that warm-up has not made: compiling takes a second.

A variant is made for an operand that is 1, or a multiple of 16, or lies at such an address, so
counts that differ from step to step must not count, and arrays must be aligned.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    "attend_split", "merge_splits", "attend_tile", "convolve_row", "rotate_heads", "norm_row",
    "gate_columns",
}  # fmt: skip


def test_warm_up_makes_all_that_steps_ask_for() -> None:
    script = Path(__file__).with_name("record_variants.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["made"]) == KERNELS
    assert found["late"] == []
