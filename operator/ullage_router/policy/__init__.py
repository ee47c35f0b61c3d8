"""The router's rules as pure functions of plain data.

They decide whether a request fits, which request runs next, on which engine it runs, and when a
client should retry. The package does no I/O: it imports neither asyncio nor gRPC, never reads a
clock, and does not depend on the packages that act on its decisions.
"""
