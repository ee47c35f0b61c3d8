"""Plans steps: admission, block reservations, batching, preemption and forks of sequences.

The package works on plain data. It imports neither torch nor gRPC, and callers inject the clock.
"""
