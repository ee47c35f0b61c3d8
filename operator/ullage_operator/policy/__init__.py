"""Decides which engine pods to restart, which nodes may be lost, and how to size pools.

The decisions have no side effects. The healer and the autoscaler in `controller` take the
measurements and carry out the decisions. This package depends on neither manifests nor rollouts.
"""
