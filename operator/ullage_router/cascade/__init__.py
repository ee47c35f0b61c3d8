"""Cascades, which try a request on smaller models first, in this service and in others.

This package runs a cascade's steps, buffers their answers until they have been judged, and sends
requests to the routers of other services. It does not depend on how answers are relayed to clients.
"""
