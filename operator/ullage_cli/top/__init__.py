"""`ullage top` shows a live view of a service's engines, queue and decisions in the terminal.

The package reads the router's pages over HTTP. It depends on neither manifests nor processes.
"""
