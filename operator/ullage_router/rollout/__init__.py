"""The router's part in a canary rollout: a side for each request, and the outcomes of each side.

The operator decides about the rollout. This room reads the operator's file, and knows nothing of
Kubernetes.
"""
