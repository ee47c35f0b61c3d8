"""The router's part in canary rollouts: picks a side for each request, and counts outcomes.

The two sides are the stable engines and the canary engines. The operator controls the rollout. This
package only reads the operator's rollout file, and does not depend on Kubernetes.
"""
