"""Settings that must be in the environment before any test module is imported."""

import os
from pathlib import Path

# Tests that compute share the cores with the processes they start. Threads that spin while they
# wait for one another burn the very time slices that those processes need: minutes for seconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Triton decides when it is imported whether kernels are compiled; without a GPU its interpreter
# runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
