"""The GPU programme: fifteen parts that prove Ullage's promises on one NVIDIA GPU, or fail by name.

`python -m benchmarks.gpu --help` says how it is run, docs/gpu.md what it judges.
"""
