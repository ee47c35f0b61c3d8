"""Plans a service for this machine: the operator's pods as commands, files and loopback ports.

This package starts no process (the package `processes` does), and does not access a cluster.
"""
