"""Cheap models first: which step answers a request, and when it is handed to the next."""
