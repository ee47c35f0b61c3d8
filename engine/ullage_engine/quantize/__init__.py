"""Rounds a model's matrices with calibration, and writes quantised models (`ullage quantize`).

This package uses the runner to compute layers. It must not depend on servers, schedulers or
workers.
"""
