"""Plans steps: admission, block reservations, batching, preemption and forks of sequences.

It decides on plain data. It knows neither torch nor gRPC, and no clock that it was not given.
"""
