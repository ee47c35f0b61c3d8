"""The engines that the router knows: their headroom reports, their models, and streams to them.

The package tracks the state of engines and carries requests to them. It never chooses among
engines.
"""
