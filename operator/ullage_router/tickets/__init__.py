"""Tickets that let clients stream directly from engines: placing, signing, and open tickets.

The package places requests by the rules of admission. It never carries tokens.
"""
