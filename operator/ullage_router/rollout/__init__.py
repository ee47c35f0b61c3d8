"""The router's part in a canary rollout: it draws a side for each request, tags answers with the
revision, and counts outcomes.

The operator decides about the rollout. This room reads the operator's file and knows nothing of
Kubernetes.
"""
