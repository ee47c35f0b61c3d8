"""Log records, metrics and traces of requests.

The package only records. It decides nothing.
"""
