"""Calibration: rounds a model's matrices for the inputs that they get; writes quantised copies of
models (`ullage quantize`).

It computes layers with the runner, and knows nothing of servers, schedulers or workers.
"""
