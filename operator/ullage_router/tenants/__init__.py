"""Tenants: their keys, their rights and quota, and their usage since the start.

Without `tenants` in the configuration, all requests belong to one unlimited tenant without a name.
The package knows neither prompts nor engines.
"""
