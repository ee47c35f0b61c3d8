"""Judges unmodified clients of other projects against a real service.

The package owns the clients' pinned versions, their environments below .clients, the programs that
use each client, the servers to judge them against, and the table of results. Programs know a server
only by its addresses: none treats Ullage differently from another server of these APIs.
"""
