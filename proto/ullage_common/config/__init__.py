"""Schemas of the configuration files of routers and engines, which the operator writes.

Sizes are in bytes and durations in seconds. Each field is defined only in this package and in the
CRD. The package does not use the CRD's terms, and works without a cluster.
"""
