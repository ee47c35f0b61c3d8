"""The GPU programme: eighteen parts that prove Ullage's promises on one NVIDIA GPU.

`python -m benchmarks.gpu --help` explains how to run it, and docs/guide/gpu.md lists its aims.
"""
