"""The gRPC wire kit: channels, errors, health, size limits, flow control, multiplexing and TLS.

It carries messages and decides nothing about them.
"""
