"""Number formats: how quantised weights are packed, scaled and rounded.

This package contains only tensor arithmetic. It must not depend on checkpoints, layers or kernels.
"""
