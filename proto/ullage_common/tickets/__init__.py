"""Tickets that let clients stream directly from engines, and the client that uses them.

This package depends on the gRPC toolkit `ullage_common.wire`, and on no server.
"""
