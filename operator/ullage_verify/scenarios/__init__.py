"""The scenarios of `ullage verify`, one module each.

A scenario sends requests to a target and records criteria. It does not print, and does not depend
on the command line.
"""
