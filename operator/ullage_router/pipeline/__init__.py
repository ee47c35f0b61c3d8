"""One request's way through the router, from a validated call to a stream of deltas.

The package calls the packages below it in order. It knows neither HTTP nor gRPC services.
"""
