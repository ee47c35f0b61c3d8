"""The driver's figures of the engine's GPUs, and the smaller batch while GPUs are throttled.

A thread of the server's process asks NVML, and pure functions decide. This room knows neither torch
nor the worker.
"""
