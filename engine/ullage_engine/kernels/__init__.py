"""Tensor code below the layers: attention over paged KV, experts, the step arena, Triton kernels.

This room knows step plans and memory layouts. It must not know layers, model files or queued
requests.
"""
