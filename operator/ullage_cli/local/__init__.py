"""Plans how a service runs on this machine: its pods become commands, files and loopback ports.

This package starts no processes, because `ullage_cli.processes` does that. It does not access a
cluster.
"""
