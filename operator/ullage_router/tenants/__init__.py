"""Tenants: their API keys, permissions and quota, and their usage since the start.

Without `tenants` in the configuration, all requests belong to one unlimited tenant without a name.
The package depends on neither prompts nor engines.
"""
