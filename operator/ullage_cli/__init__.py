"""The `ullage` command.

The package parses arguments, prints output, plans a service for this machine (`local`) and runs the
service (`processes`). It talks to routers and engines only over the network.
"""
