"""The Kubernetes operator of Ullage, which plans what a service needs and applies the plan.

`docs/reasons/code-map.md` shows the order of its rooms. The operator speaks to routers and engines
only over the network.
"""
