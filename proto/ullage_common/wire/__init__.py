"""The gRPC toolkit: channels, servers, errors, size limits, flow control, multiplexing and TLS.

The package carries messages and decides nothing about them.
"""
