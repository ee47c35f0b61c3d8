"""The engines of the router: their headroom reports, their models, and the streams to them.

The package tracks the state of engines and carries requests to them. It does not choose among
engines.
"""
