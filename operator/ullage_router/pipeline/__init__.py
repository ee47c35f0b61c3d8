"""One request's way through the router, from a validated call to a stream of deltas.

This room joins the rooms below in order, and knows neither HTTP nor gRPC's services.
"""
