"""Which KV blocks exist, which are shared, and which may be evicted: the block pool, the prefix
cache's radix tree and sessions.

It counts blocks and never touches their bytes, so it knows neither torch nor requests, scheduling
or devices.
"""
