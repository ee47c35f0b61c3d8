"""The configuration files of routers and engines, which the operator writes: bytes and seconds.

A field stands here and in the CRD, nowhere else. Nothing here knows the API's words or a cluster.
"""
