"""Decides what the next step computes: admission, block reservations, batching, preemption and
forks of sequences.

It decides on plain data, so it knows neither torch nor gRPC nor a clock that it was not given.
"""
