"""The router as a process: its assembled parts, its certificates, and its load report.

Only this package creates the parts in the others, and no other package imports it.
"""
