"""Chat templates, messages, tool formats and the special tokens around raw texts, as the engine and
the router both apply them.

It knows texts and tokens, and nothing of requests on the wire.
"""
