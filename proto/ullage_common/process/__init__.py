"""Process utilities: configuration files, logs, metrics, memory limits and file watching.

This package depends on neither gRPC messages nor services.
"""
