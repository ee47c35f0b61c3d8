"""Plans what must be done for a service, from its specification and the observed cluster.

It is pure: `controller` observes the cluster before and applies the plan after, and `ullage up`
runs the planned pods as processes.
"""
