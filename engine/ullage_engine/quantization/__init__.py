"""Number formats: how quantised weights are packed, scaled and rounded.

This room knows arithmetic on tensors. It must not know checkpoints, layers or kernels.
"""
