"""`ullage trace` prints the steps of one request, from the logs of all processes that handled it.

The package reads log lines from files and `kubectl logs`. It sends no requests to processes.
"""
