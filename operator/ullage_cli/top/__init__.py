"""`ullage top` shows a service's engines, queue and decisions live in the terminal.

The package reads the router's pages over HTTP. It depends on neither manifests nor processes.
"""
