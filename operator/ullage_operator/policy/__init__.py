"""Decides which engine pods to restart, which nodes may be lost, and how many engines a pool has.

The decisions are pure: the healer and the autoscaler of `controller` measure and act. This room
knows neither manifests nor rollouts.
"""
