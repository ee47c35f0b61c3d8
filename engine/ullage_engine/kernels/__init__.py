"""Tensor code used by layers: attention over paged KV, experts, step buffers and Triton kernels.

This package depends on step plans and memory layouts. It must not depend on layers, model files or
queued requests.
"""
