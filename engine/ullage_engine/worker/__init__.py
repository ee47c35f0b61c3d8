"""The worker processes: the startup of a rank, the step loop, and the group of a model's ranks.

The worker talks to the server only through `protocol`, and does not depend on gRPC.
"""
