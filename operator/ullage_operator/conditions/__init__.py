"""The conditions of a service's status, and the diagnosis of its pods.

This package only reads the objects that it is given, and changes nothing.
"""
