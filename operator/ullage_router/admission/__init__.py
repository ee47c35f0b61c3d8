"""Request admission: the fallbacks for requests that do not fit, the queue, and scale to zero.

This package carries out the decisions that `policy` makes. It prefers engines that already have a
request's prompt prefix in their KV cache. It depends on the engines, but on neither HTTP nor the
response streams.
"""
