"""The gRPC face of the router."""
