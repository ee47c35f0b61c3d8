"""Cascades, which try a request on a small model first and on larger ones only if necessary.

The models may be served by this service or by others. This package runs a cascade's steps, buffers
their answers until they have been judged, and sends requests to the routers of other services. It
does not depend on how answers are relayed to clients.
"""
