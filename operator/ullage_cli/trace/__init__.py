"""`ullage trace` prints the steps of one request, from the logs of all processes that handled it.

It reads log lines of files and of `kubectl logs`, and asks no running process.
"""
