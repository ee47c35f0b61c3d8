"""What every process here needs: configuration files, logs, metrics, memory limits and watched
files.

It knows no message and no service.
"""
