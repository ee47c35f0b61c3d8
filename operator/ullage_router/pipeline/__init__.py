"""One request's way through the router, from a validated call to a stream of deltas.

It joins the rooms below in order, and knows neither HTTP nor gRPC's services.
"""
