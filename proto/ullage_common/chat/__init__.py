"""Chat templates, tool-call formats and special tokens, which the router and the engine share.

This package works on text, tokens and messages. It depends on neither gRPC channels nor servers.
"""
