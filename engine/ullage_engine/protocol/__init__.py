"""Plain data that the server and worker processes share: requests, messages, step plans, errors.

It is the lowest room. It knows neither torch nor gRPC, and has no behaviour of either process.
"""
