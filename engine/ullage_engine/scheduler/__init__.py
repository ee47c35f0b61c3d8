"""Plans steps: admission, block reservations, batching, preemption and forks of sequences.

The package decides on plain data. It imports neither torch nor gRPC, and its clock is injected.
"""
