"""The router's view of engines: headroom reports, models, and request streams.

This package tracks the state of engines and sends requests to them. It does not choose the engine
for a request.
"""
