"""Stores the files that clients upload, in one folder with limits.

The package knows nothing of HTTP, and nothing of prompts or engines.
"""
