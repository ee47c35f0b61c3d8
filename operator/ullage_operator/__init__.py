"""Kubernetes operator of Ullage."""
