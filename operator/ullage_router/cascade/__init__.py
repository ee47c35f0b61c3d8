"""Cascades: a request tries smaller models first, here and at other services.

This package runs the steps, buffers their answers until they have been judged, and sends requests
to other services' routers. It does not depend on how answers are relayed to clients.
"""
