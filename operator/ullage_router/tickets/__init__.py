"""Tickets, which let clients stream answers directly from engines instead of through the router.

This package places requests by the same rules as admission, signs tickets, and tracks open tickets.
The tokens of answers do not pass through it.
"""
