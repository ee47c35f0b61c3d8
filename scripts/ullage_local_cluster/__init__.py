"""A real Kubernetes on this machine for the cluster's tests: one node, and no virtual machine.

It builds and starts programs, and makes links, mounts and iptables chains of its own. It knows
nothing of operator, router and engine except the names of their images.
"""
