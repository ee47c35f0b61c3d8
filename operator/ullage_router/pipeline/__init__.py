"""The path of a request through the router, from a validated call to a stream of deltas.

The package calls the lower-level packages in order. It depends on neither HTTP nor gRPC services.
"""
