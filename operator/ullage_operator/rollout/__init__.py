"""Rollouts by canary: stages, the analysis that promotes or rolls back, and the kept state.

It decides from given observations, and knows no cluster.
"""
