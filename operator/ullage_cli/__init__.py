"""The `ullage` command.

It parses arguments, prints, plans a service for this machine (`local`) and runs it (`processes`).
It speaks to routers and engines only over the network.
"""
