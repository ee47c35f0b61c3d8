"""Runs the pods of a local plan as processes, and scales them: `ullage up` after its plan.

This room knows processes, probes and the router's load reports, and neither manifests nor a
cluster.
"""
