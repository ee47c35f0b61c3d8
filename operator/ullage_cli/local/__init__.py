"""Runs the operator's plan as processes on this machine instead of pods, for `ullage up`.

It knows processes and ports, and no cluster.
"""
