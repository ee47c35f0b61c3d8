"""The Kubernetes objects that a service needs, as plain data.

This package builds manifests and configuration files from a spec, but does not apply them.
"""
