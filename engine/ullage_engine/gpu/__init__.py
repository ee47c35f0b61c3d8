"""What the driver says of the engine's GPUs, and what is done about GPUs that are throttled.

It asks NVML from a thread of the server's process, and decides purely. It knows neither torch nor
the worker.
"""
