"""Request admission: the ladder of steps, the queue, load balancing, and scale to zero.

This package carries out the decisions that `policy` makes. It depends on the engines, but on
neither HTTP nor the response streams.
"""
