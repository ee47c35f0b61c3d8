"""Runs and scales a local plan's pods as processes, once `ullage up` has made the plan.

This package handles processes, probes and the router's load reports. It depends on neither
manifests nor a cluster.
"""
