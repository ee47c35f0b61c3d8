"""Tickets with which clients stream straight from engines: placing, signing, and what is still
open.

It places by admission's rules and never carries tokens.
"""
