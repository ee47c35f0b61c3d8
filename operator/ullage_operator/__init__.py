"""The Kubernetes operator of Ullage: plans what a service needs and applies it.

Its rooms stand one above the other (`docs/reasons/code-map.md`); it meets routers and engines
only on the wire.
"""
