"""`ullage top` shows a live view of a service's engines, queue and decisions in the terminal.

The package polls the router's `/stats` and `/metrics` over HTTP. It depends on neither manifests
nor processes.
"""
