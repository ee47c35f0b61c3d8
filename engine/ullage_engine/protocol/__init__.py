"""Plain data that the server and worker processes share: requests, messages, step plans, errors.

All other packages of the engine may import this package. It imports neither torch nor gRPC, and
contains no logic of either process.
"""
