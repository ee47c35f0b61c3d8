"""Runs the pods of a local plan as processes, and scales them. `ullage up` makes the plan.

This package handles processes, probes and the router's load reports. It depends on neither
manifests nor a cluster.
"""
