"""Benchmarks of Ullage: `python -m benchmarks` lists them.

Each name is a module with a `main`, or a package if a benchmark needs several files. `support`
has the code that several benchmarks share. `gpu` is a separate programme for GPU machines.
"""
