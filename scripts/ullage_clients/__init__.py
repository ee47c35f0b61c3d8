"""Judges unmodified clients of other projects against a real service.

The package owns the clients' pinned versions, their environments below .clients, the programs that
use each client, and the table of results. It knows the service only by its addresses: no program
treats Ullage differently from another server of these APIs.
"""
