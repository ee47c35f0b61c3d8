"""Chat templates, tool formats and special tokens, for the router and the engine alike.

This package works on texts, tokens and messages. It depends on neither gRPC channels nor servers.
"""
