"""The gRPC toolkit: channels, servers, errors, size limits, flow control, multiplexing and TLS.

This package transports messages and makes no decisions about their content.
"""
