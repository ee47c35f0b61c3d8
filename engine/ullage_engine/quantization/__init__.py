"""Number formats: how quantised weights are packed, scaled and rounded.

It knows arithmetic on tensors, and nothing of checkpoints, layers or kernels.
"""
