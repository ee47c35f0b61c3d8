"""Schemas of the configuration files of routers and engines, which the operator writes.

Sizes are in bytes and durations in seconds. Each field is defined only here and in the CRD. This
package depends on neither the CRD's vocabulary nor a cluster.
"""
