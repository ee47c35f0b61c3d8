"""The request pipeline, which turns a validated call into a stream of answer events.

This package calls the lower-level packages in order. It depends on neither HTTP nor gRPC.
"""
