"""KV blocks as numbers: the block pool, the prefix cache with its radix tree, and sessions.

It counts blocks and never touches their bytes. It knows neither torch nor requests, scheduling or
devices.
"""
