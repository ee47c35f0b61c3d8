"""Log records, metrics and traces of requests.

This room records and decides nothing.
"""
