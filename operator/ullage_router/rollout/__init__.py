"""The router's part in canary rollouts: draws sides for requests, and counts each side's outcomes.

The operator controls the rollout. This package only reads the operator's rollout file, and does not
depend on Kubernetes.
"""
