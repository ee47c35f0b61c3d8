"""Plans steps: admits, batches, preempts and forks sequences, and reserves their KV blocks.

The package works on plain data. It imports neither torch nor gRPC, and callers supply the clock.
"""
