"""Tickets that let clients stream directly from engines, and the client that uses them.

It knows the wire toolkit and no server.
"""
