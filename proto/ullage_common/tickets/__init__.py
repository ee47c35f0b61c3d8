"""Tickets that let clients stream directly from engines, and a client that uses tickets.

This package depends on the gRPC toolkit `ullage_common.wire`, but on no server code.
"""
