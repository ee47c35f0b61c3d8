"""The Kubernetes operator of Ullage, which plans what a service needs and applies the plan.

`docs/reasons/code-map.md` lists the operator's packages and the order in which they may import each
other. The operator communicates with routers and engines only over the network.
"""
