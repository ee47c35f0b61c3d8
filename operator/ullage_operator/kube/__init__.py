"""The Kubernetes API: client, cache, watches, Events and the lease.

Only this package imports kopf and HTTP clients. It does not interpret the contents of services.
"""
