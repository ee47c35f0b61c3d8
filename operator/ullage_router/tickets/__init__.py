"""Tickets that let clients stream answers directly from engines, bypassing the router.

This package chooses engines by the same rules as admission, signs tickets, and tracks open tickets.
The answers themselves do not pass through it.
"""
