"""The conditions of a service's status, and diagnoses of its pods.

It reads given objects and changes nothing.
"""
