"""The Kubernetes API: client, cache, watches, Events and the lease.

Only this room imports kopf and HTTP clients. It does not know what a service means.
"""
