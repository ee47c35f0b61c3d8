"""Plans how a service runs on this machine: its pods become commands, files and loopback ports.

This package does not start processes (`ullage_cli.processes` does), and it never accesses a
cluster.
"""
