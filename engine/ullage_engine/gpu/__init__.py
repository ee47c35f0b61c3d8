"""Exports GPU metrics from the driver, and reduces the batch while GPUs are throttled.

A thread in the server process queries NVML, and pure functions choose the batch size. This package
depends on neither torch nor the worker.
"""
