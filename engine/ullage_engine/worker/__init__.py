"""The worker processes: startup, the step loop, and the group of ranks that serve one model.

The worker communicates with the server only through the messages in `protocol`, and does not depend
on gRPC.
"""
