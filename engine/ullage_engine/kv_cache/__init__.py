"""KV block management: the block pool, the prefix cache with its radix tree, and sessions.

The package tracks block ids and never touches the blocks' contents. It does not depend on torch,
requests, scheduling or devices.
"""
