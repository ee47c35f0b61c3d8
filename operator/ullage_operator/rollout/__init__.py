"""Rollouts by canary: the stages, the analysis that promotes or rolls back, and the kept state.

This room decides from given observations. It knows no cluster.
"""
