"""The engines that the router knows: their reports of headroom, their descriptions, and the streams
to them.

It says what engines are and carries requests there, and never chooses among them.
"""
