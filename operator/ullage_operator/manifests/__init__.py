"""The Kubernetes objects that a service needs, as plain data.

It writes manifests and configuration files from a specification, and applies nothing.
"""
