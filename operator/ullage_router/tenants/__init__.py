"""Tenants, with their API keys, permissions, quotas and usage.

If no `tenants` are configured, all requests belong to one unlimited tenant without a name. This
package depends on neither prompts nor engines.
"""
