"""Chat templates, messages and tool formats, as the engine and the router both apply them.

It knows texts, and nothing of requests on the wire.
"""
