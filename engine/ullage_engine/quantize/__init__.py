"""Calibrated rounding of a model's matrices, and quantised copies of models (`ullage quantize`).

This package computes layers with the runner. It must not depend on servers, schedulers or workers.
"""
