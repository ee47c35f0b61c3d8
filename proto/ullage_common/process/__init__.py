"""Basics of every process: configuration files, logs, metrics, memory limits and file watching.

This package depends on no gRPC message and no service.
"""
