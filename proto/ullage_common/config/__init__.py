"""Schemas of the configuration files of routers and engines, which the operator writes.

Sizes are in bytes and durations in seconds. Each field is defined in two places only, in this
package and in the CRD. The package does not depend on the CRD's terms, and works without a cluster.
"""
