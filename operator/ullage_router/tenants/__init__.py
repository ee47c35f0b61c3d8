"""Tenants: who sends a request, what a tenant may do, and how much it has used since the start.

Without `tenants` in the configuration all requests belong to one unlimited tenant without a name.
This room knows neither prompts nor engines.
"""
