"""Plans a service for this machine: the operator's pods as commands, files and loopback ports.

This room starts no process (`processes` does), and knows no cluster.
"""
