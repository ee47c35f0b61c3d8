"""Log records, metrics and traces for requests.

This package only records what happens and makes no decisions.
"""
