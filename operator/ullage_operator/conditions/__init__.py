"""The conditions of a service's status, and the diagnosis of its pods.

This room reads given objects and changes nothing.
"""
