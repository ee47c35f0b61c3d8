"""Runs batches: files whose lines are requests, answered at the lowest priority.

The package sends requests through a function that `http` provides, and knows nothing of HTTP, of
prompts or of engines.
"""
