"""Tickets with which clients stream straight from engines: placing, signing, and open tickets.

The package places requests by the rules of admission. It never carries tokens.
"""
