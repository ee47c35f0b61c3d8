"""Calibrated rounding of a model's matrices, and quantised copies of models (`ullage quantize`).

This room computes layers with the runner. It must not know servers, schedulers or workers.
"""
