"""Number formats: how quantised weights are packed, scaled and rounded.

This package has only arithmetic on tensors. It must not depend on checkpoints, layers or kernels.
"""
