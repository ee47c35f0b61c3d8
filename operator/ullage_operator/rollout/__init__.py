"""Canaries: their stages, the analysis that promotes or rolls back, and the state that survives a
restart.

It decides from samples that it is given, and knows no cluster.
"""
