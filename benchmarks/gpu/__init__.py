"""The GPU programme: fifteen parts that prove Ullage's promises on one NVIDIA GPU, or fail by name.

`python -m benchmarks.gpu --help` says how it is run, docs/gpu.md what it judges.
"""

import sys
from pathlib import Path

# The scripts of this package's folder import one another by name, as Python does it for a script.
sys.path.append(str(Path(__file__).parents[1]))
