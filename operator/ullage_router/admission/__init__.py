"""Request admission: the fallbacks for requests that do not fit, the queue, and scale to zero.

This package carries out the decisions that `policy` makes, and prefers engines that cache a
request's prefix. It depends on the engines, but on neither HTTP nor the response streams.
"""
