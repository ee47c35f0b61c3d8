"""Decides which engine pods to restart, which nodes may be lost, and how many engines a pool has.

The decisions have no side effects. The healer and the autoscaler in `controller` measure and act.
This package depends on neither manifests nor rollouts.
"""
