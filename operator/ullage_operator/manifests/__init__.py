"""The Kubernetes objects that a service needs, as plain data.

This room builds manifests and configuration files from a spec. It applies nothing.
"""
