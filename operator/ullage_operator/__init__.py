"""Ullage's Kubernetes operator, which plans the objects that a service needs and applies them.

`docs/reasons/code-map.md` lists the operator's packages and the order in which they may import each
other. The operator communicates with routers and engines only over the network.
"""
