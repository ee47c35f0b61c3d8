"""The router as a process: its parts put together, its certificates, and its load report.

This room alone builds the others, and none of them knows it.
"""
