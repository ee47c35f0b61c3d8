"""The `ullage` command.

It parses arguments, prints, and runs the operator's plan as processes on this machine (`local`). It
meets routers and engines only on the wire.
"""
