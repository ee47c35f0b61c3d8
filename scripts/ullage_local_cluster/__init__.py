"""A real single-node Kubernetes on this machine for the cluster tests, without a virtual machine.

This package builds and starts programs, and creates separate network links, mounts and iptables
chains. It depends on the names of the images of operator, router and engine, but not on their code.
"""
