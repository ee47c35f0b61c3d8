"""Runs and scales the pods of a local plan as processes, after `ullage up` has made the plan.

This package handles processes, probes and the router's load reports. It depends on neither
manifests nor a cluster.
"""
