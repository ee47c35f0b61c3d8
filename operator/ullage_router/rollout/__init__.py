"""The router's part in a canary rollout: a side for each request, and the outcomes of each side.

The operator decides about the rollout. The package reads the operator's file, and does not depend
on Kubernetes.
"""
