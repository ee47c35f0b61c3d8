"""The basics of every process: configuration files, logs, metrics, memory limits, watched files.

The package knows no message and no service.
"""
