"""Rollouts by canary: the stages, the analysis that promotes or rolls back, and the kept state.

This package makes decisions from given observations. It does not access a cluster.
"""
