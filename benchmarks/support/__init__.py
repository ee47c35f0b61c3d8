"""Code that several benchmarks share: processes under test, load, plots, small models.

No module here imports a benchmark.
"""
