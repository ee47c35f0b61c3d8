"""The router's rules as pure functions of plain data.

They decide which requests fit, which one goes next, to which engine, and when a client should
retry. The package does no I/O: it imports neither asyncio nor gRPC, reads no clock, and knows no
package that acts on its decisions.
"""
