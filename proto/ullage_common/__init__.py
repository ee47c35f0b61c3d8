"""What the operator, the router and engines share.

It knows the protos and none of the three packages that use it.
"""
