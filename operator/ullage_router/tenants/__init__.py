"""Tenants: the sender of a request, a tenant's rights and quota, and its use since the start.

Without `tenants` in the configuration all requests belong to one unlimited tenant without a name.
This room knows neither prompts nor engines.
"""
