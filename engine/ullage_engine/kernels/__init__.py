"""Tensor code that layers call: paged attention, experts, step buffers and Triton kernels.

This package depends on step plans and memory layouts. It must not depend on layers, model files or
the queue of requests.
"""
