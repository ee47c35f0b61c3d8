"""Decides which engine pods restart, which nodes may be lost, and how many engines a pool has.

It is pure: the healer and the autoscaler of `controller` measure and act. It knows neither
manifests nor rollouts.
"""
