"""Tickets that let clients stream straight from engines, and the client that uses them.

It knows the wire kit and no server.
"""
