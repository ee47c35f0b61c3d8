"""GPU metrics from the driver, and a smaller batch while GPUs are throttled.

A thread of the server process queries NVML, and pure functions decide. This package depends on
neither torch nor the worker.
"""
