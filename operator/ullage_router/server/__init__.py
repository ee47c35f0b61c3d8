"""The router process: its components, its certificates and its load report.

Only this package creates the components of the other packages, and no other package imports it.
"""
