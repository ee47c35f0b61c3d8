"""Everything that speaks to the Kubernetes API: client, cache, watches, events and the lease.

It alone imports kopf and HTTP clients, and knows nothing of what a service means.
"""
