"""Cascades: a request tries smaller models first, here and at other services.

The package owns the steps, the answers that they hold back, and the calls to other services'
routers. It does not know how an answer is relayed to a client.
"""
