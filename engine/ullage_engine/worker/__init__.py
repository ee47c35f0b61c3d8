"""The worker processes: startup, the step loop, and the group of ranks that serve one model.

The worker talks to the server only through `protocol`, and does not depend on gRPC.
"""
