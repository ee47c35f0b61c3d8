"""The `ullage` command.

It parses arguments, prints, plans a service for this machine (`local`) and runs it (`processes`).
It meets routers and engines only on the wire.
"""
