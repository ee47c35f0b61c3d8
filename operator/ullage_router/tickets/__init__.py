"""Tickets with which clients stream straight from engines: placing, signing, and open tickets.

The folder places by admission's rules and never carries tokens.
"""
