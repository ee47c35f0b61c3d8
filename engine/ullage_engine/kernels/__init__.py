"""Tensor code that layers build on: attention over paged KV, experts, the step arena, Triton.

This package depends on step plans and memory layouts. It must not depend on layers, model files or
queued requests.
"""
