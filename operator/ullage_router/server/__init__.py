"""The router as a process: its parts put together, its certificates, and its load report.

It is the only room that builds the others; none below knows it.
"""
