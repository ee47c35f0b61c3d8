"""Access to the Kubernetes API: client, cache, watches, Events and the leader election's Lease.

Only this package imports kopf and HTTP clients. It does not interpret the specs of services.
"""
