"""The router's view of engines: their headroom reports, their models, and streams of requests.

This package tracks the state of engines and sends requests to them. It does not choose the engine
for a request.
"""
