"""LFM2-8B-A1B with seeded random weights: samples a second to logits, which are then checked.

`python -m benchmarks.gpu.lfm2` runs it alone; the programme takes its `figures`.
"""

from benchmarks.gpu.lfm2.run import figures

__all__ = ["figures"]
