"""The router's part in canary rollouts: picks a side per request, and counts each side's outcomes.

The two sides are the stable and the canary engines. The operator controls the rollout. This package
only reads the operator's rollout file, and does not depend on Kubernetes.
"""
