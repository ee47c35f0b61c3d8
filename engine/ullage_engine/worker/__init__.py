"""The worker processes: the start of a rank, the step loop, and the group of ranks of one model.

The worker talks to the server only through `protocol`, and does not depend on gRPC.
"""
