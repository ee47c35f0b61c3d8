"""The engines that the router knows: their headroom reports, their models, and streams to them.

The package says in which state engines are and carries requests to them. It never chooses among
them.
"""
