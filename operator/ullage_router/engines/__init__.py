"""Tracks engines through their headroom reports, loads their models, and sends them requests.

This package does not choose the engine for a request.
"""
