"""The configuration files of routers and engines, which the operator writes in bytes and seconds.

A field is defined here and in the CRD, and nowhere else. Nothing here knows the API's words or a
cluster.
"""
