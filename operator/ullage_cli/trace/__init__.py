"""`ullage trace` prints a request's history from the logs of all processes that handled it.

The package reads log lines from files and `kubectl logs`. It never contacts the processes
themselves.
"""
