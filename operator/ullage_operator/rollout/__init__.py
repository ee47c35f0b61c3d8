"""Canary rollouts: their stages, the analysis that promotes or rolls back, and the stored state.

This package makes decisions from observations that it is given, and does not access a cluster.
"""
