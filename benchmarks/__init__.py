"""Benchmarks of Ullage: `python -m benchmarks` lists them.

Each name is a module with a `main` or, where a benchmark needs several files, a package. `support`
holds the code that several of them share. `gpu` is a programme of its own for GPU machines.
"""
