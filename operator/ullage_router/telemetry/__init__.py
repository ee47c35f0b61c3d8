"""Log records, metrics and traces of requests.

This room records what happened and decides nothing.
"""
