"""Rounds a model's matrices with calibration, and writes quantised models (`ullage quantize`).

This package computes layers with the runner. It must not depend on servers, schedulers or workers.
"""
