"""Runs the pods of a local plan as processes, and scales them: `ullage up` after its plan.

It knows processes, probes and the router's measures, and neither manifests nor a cluster.
"""
