"""`ullage top` shows a service's engines, queue and decisions live in the terminal.

It reads the router's pages over HTTP and knows neither manifests nor processes.
"""
