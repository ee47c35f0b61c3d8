"""The router as a process: its parts put together, its worker processes, and what it reports of its
load.

It is the only room that builds the others; none below knows it.
"""
