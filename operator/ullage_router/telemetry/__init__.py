"""What is recorded of requests: log records, metrics and traces.

It records what happened and decides nothing.
"""
