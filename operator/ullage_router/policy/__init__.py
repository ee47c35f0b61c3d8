"""The router's rules as pure functions of plain data: what fits, who is next, which engine, when to
come back.

It knows no I/O: neither asyncio nor gRPC nor a clock, and no room that acts.
"""
