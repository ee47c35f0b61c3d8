"""The worker processes: start-up of a rank, the step loop, and the group of ranks that serves one
model.

It speaks to the server only through protocol, and knows nothing of gRPC.
"""
